// Ranks what the search finds: pages that are about the words come before those that only have them.
const SAYS_NOTHING = ["vs", "nn", "functional"]; // "a vs b" asks for both, torch.nn.functional.softmax for the last

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
    const said = splitQuery(query).filter((word) => !stopwords.has(word) && !SAYS_NOTHING.includes(word));
    const words = said.map((word) => stemmer.stemWord(word));
    const pairs = words.slice(1).map((word, place) => `${words[place]} ${word}`);
    const own = kind === "text" ? 0 : kind === "index" ? score / 50 : score;
    return [...words, ...pairs].reduce((sum, word) => sum + (weights[word] ?? 0), own);
  },
};

// What a page says in sentences and code is shown of it, not its links, charts and folds
document.addEventListener("DOMContentLoaded", () => {
  const aside = ".breadcrumbs, .headerlink, .glance, .figure-links, .recorded-label, details, svg";
  Search.htmlToText = (html, anchor) => {
    const content = new DOMParser().parseFromString(html, "text/html").querySelector("[role=main]");
    for (const element of content.querySelectorAll(aside)) element.remove();
    return ((anchor && content.querySelector(anchor)) || content).textContent;
  };
});
