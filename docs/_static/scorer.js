// Ranks what the search finds: pages that are about the words come before those that only have them.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 0,
  term: 0,
  partialTerm: 0,

  score([page, , , , score, , kind]) {
    const weights = searchWeights[page] ?? {};
    const stemmer = new Stemmer();
    const query = new URLSearchParams(location.search).get("q").toLowerCase().trim();
    const said = splitQuery(query).filter((word) => !stopwords.has(word) && word !== "vs"); // "a vs b" asks for both
    const words = said.map((word) => stemmer.stemWord(word));
    const pairs = words.slice(1).map((word, place) => `${words[place]} ${word}`);
    const own = kind === "text" ? 0 : kind === "index" ? score / 50 : score;
    return [...words, ...pairs].reduce((sum, word) => sum + (weights[word] ?? 0), own);
  },
};
