// The search: has MiniSearch index what `search_index.js` holds, ranks the results, and shows them as a reader types.
const search = (() => {
  const WEIGHTS = { title: 9, names: 4, headings: 3, about: 3, text: 1, code: 0.6 };
  const KINDS = { Lesson: 1.3, Op: 1, Guide: 1, FAQ: 1, Glossary: 0.35, "": 1 };
  const PAGES = { changelog: 0.2, contributing: 0.4, index: 0.4, api: 0.5 };
  const FEW = 6; // pages
  const LONGEST = 320; // excerpt, in characters
  const NEAR = 0.4; // of the best score: an answer of the FAQ that scores less is about something else
  const SAME = 0.7; // the weight of a synonym; that of the word itself is 1
  const FILLER = 0.1; // that of a word that says little: it decides between pages that are alike otherwise
  const STRONG = ["title", "names", "headings", "about"];

  // Words are compared without their endings
  const stem = (word) => {
    if (word.length < 5 || /\d/.test(word)) return word.length > 3 ? word.replace(/([^su])s$/, "$1") : word;
    const singular = word
      .replace(/ies$/, "y")
      .replace(/([^su])s$/, "$1")
      .replace(/ator$/, "ate");
    const bare = singular.replace(/(i[sz]ations?|i[sz]ed?|i[sz]ing|ations?|ing|ed|er|e)$/, "");
    return bare.length > 2 ? bare.replace(/([^aeiouls])\1$/, "$1") : singular;
  };

  // The words of a text, each with the stems of its parts and other names of it: "tl.dot_scaled", "LayerNorm"
  const analysed = new Map();
  const analyse = (word) => {
    const lower = word.toLowerCase();
    const parts = lower.split(/[.\-/+_]+/).filter(Boolean);
    const camel = word
      .replace(/([a-z])([A-Z])/g, "$1 $2")
      .replace(/([A-Z])([A-Z][a-z])/g, "$1 $2")
      .toLowerCase();
    const humps = camel.split(" ").filter((part) => part.length > 2 && part.length < word.length);
    const joined = [lower, lower.split(".").pop()].map((name) => name.replace(/[.\-/_]/g, ""));
    const also = parts.length > 1 ? joined : humps;
    return { word: lower, parts, stems: parts.map(stem), also: [...new Set(also.map(stem))] };
  };
  const split = (text) =>
    (text.replace(/[’']s\b/g, "").match(/[\p{L}\p{N}_]+(?:[.\-/+]+[\p{L}\p{N}_]+)*\+*/gu) ?? []).map((word) => {
      if (!analysed.has(word)) analysed.set(word, analyse(word));
      return analysed.get(word);
    });
  const flat = (words) => words.flatMap(({ stems }) => stems);
  const pairsOf = (stems) => stems.slice(1).map((stem, place) => stems[place] + stem);

  const filler = new Set(searchIndex.filler.split(/\s+/));
  const phrases = new Map(); // by their first stem
  for (const [group, names] of searchIndex.synonyms.entries()) {
    for (const stems of names.map((name) => flat(split(name)))) {
      phrases.set(stems[0], [...(phrases.get(stems[0]) ?? []), { stems, group: `=${group}=` }]);
    }
  }
  const phrasesIn = (stems) =>
    stems.flatMap((first, place) =>
      (phrases.get(first) ?? []).filter((phrase) => phrase.stems.every((stem, next) => stems[place + next] === stem)),
    );

  const known = new Set();
  const tokens = (text, field) => {
    const words = split(text);
    const stems = flat(words);
    const all = [...stems, ...words.flatMap(({ also }) => also)];
    const more = field === "text" || field === "code" ? [] : pairsOf(stems);
    const groups = field === "code" ? [] : phrasesIn(stems).map(({ group }) => group);
    for (const token of all) known.add(token);
    for (const token of more) known.add(token);
    return [...all, ...more, ...new Set(groups)];
  };

  const entries = searchIndex.entries;
  const engine = new MiniSearch({
    fields: Object.keys(WEIGHTS),
    tokenize: tokens,
    processTerm: (term) => term,
    extractField: (entry, field) => entry[field],
  });
  const ready = engine.addAllAsync(
    entries.map((entry, id) => ({
      id,
      title: entry.title,
      names: entry.names.join(" "),
      headings: entry.sections.map(({ title }) => title).join(" "),
      about: entry.about,
      text: entry.sections.map(({ text }) => text).join(" "),
      code: entry.code.join(" "),
    })),
    { chunkSize: 20 }, // between two, the page answers the reader
  );

  // What a search asks for: its words, each with all that it may be found by
  const read = (query) => {
    const words = split(query);
    const telling = words.filter(({ parts }) => !parts.every((part) => filler.has(part)));
    const stems = flat(words);
    const said = phrasesIn(stems);
    const kept = telling.length || said.some((phrase) => phrase.stems.length > 1) ? telling : words;
    const asked = kept.map(({ word, parts, stems, also }) => {
      const own = kept === telling ? stems.filter((_, place) => !filler.has(parts[place])) : stems;
      return { word, stems: own, tokens: new Map([...own, ...also].map((token) => [token, 1])) };
    });
    for (const { stems: phrase, group } of said) {
      const inside = asked.filter(({ tokens }) => phrase.some((part) => tokens.has(part)));
      const several = phrase.length > 1;
      for (const { tokens } of inside) tokens.set(group, several ? 1 : SAME);
      // A phrase of nothing but filler is a word of its own
      if (several && !inside.length) asked.push({ word: "", stems: [], tokens: new Map([[group, 1]]) });
    }
    const isFiller = words.flatMap(({ parts }) => parts.map((part) => filler.has(part)));
    const weigh = (pair, place) => [pair, isFiller[place] && isFiller[place + 1] ? 0.3 : 1];
    return { asked, stems, pairs: new Map(pairsOf(stems).map(weigh)) };
  };

  const rank = ({ asked, stems, pairs }, typing) => {
    const weights = new Map([...stems.map((stem) => [stem, FILLER]), ...pairs]);
    for (const { tokens } of asked)
      for (const [token, weight] of tokens) weights.set(token, Math.max(weight, weights.get(token) ?? 0));
    const last = typing && asked.length ? [...asked.at(-1).tokens.keys()] : [];
    const own = new Set(asked.flatMap(({ stems }) => stems));
    const isGuess = (token) => own.has(token) && !known.has(token);
    const found = engine.search([...weights.keys()].join(" "), {
      tokenize: (text) => text.split(" "),
      boost: WEIGHTS,
      boostTerm: (token) => weights.get(token),
      prefix: (token) => token.length > 2 && (isGuess(token) || last.includes(token)),
      fuzzy: (token) => isGuess(token) && token.length > 4 && (token.length > 7 ? 2 : 1),
      maxFuzzy: 2,
    });
    const ranked = found.map(({ id, score, queryTerms, terms, match }) => {
      const entry = entries[id];
      const hit = asked.map(({ tokens }) => queryTerms.some((token) => tokens.has(token)));
      const share = hit.filter(Boolean).length / asked.length;
      const kind = KINDS[entry.kind] * (PAGES[entry.page.split("/").pop()] ?? 1);
      return { entry, terms, match, queryTerms, score: (score / queryTerms.length) * share * kind };
    });
    return ranked.filter(({ score }) => score > 0).sort((a, b) => b.score - a.score);
  };

  // The fields in which a result has a word, or one that it may be misspelt for
  const fieldsOf = ({ match }, { word, tokens }) =>
    Object.entries(match).flatMap(([term, fields]) =>
      tokens.has(term) || term.slice(0, 2) === word.slice(0, 2) ? fields : [],
    );

  // What the gallery has no page about: all words of a search, if the best results only mention them and one is on
  // few pages. Else the words that hardly any page mentions
  const unknown = (asked, results) => {
    const isAbout = (word) => (field) => /[._]/.test(word) || STRONG.includes(field);
    const left = asked.filter(
      (word) => !results.slice(0, 5).some((result) => fieldsOf(result, word).some(isAbout(word.word))),
    );
    const having = (word) => results.filter((result) => fieldsOf(result, word).length).length;
    const isAll = left.length === asked.length && left.some((word) => having(word) < FEW);
    const named = (isAll ? left : left.filter((word) => having(word) < 2)).map(({ word }) => word).join(" ");
    return { lacks: isAll ? named : "", rare: isAll ? "" : named };
  };

  // Whether a search has all words of a name, or synonyms of them
  const has = (query, name) => {
    const words = split(query);
    const groups = (of) => phrasesIn(flat(of));
    const asked = new Set([...flat(words), ...words.flatMap(({ also }) => also), ...pairsOf(flat(words))]);
    for (const { group } of groups(words)) asked.add(group);
    const synonyms = groups(split(name)).filter(({ group }) => asked.has(group));
    return split(name).every(
      ({ stems }) =>
        asked.has(stems.join("")) || synonyms.some((phrase) => stems.every((part) => phrase.stems.includes(part))),
    );
  };

  // The section of an entry that has most of the words, and its sentences from the one that has most
  const excerpt = ({ entry, terms }) => {
    const wanted = new Set(terms);
    const count = (text, field) => new Set(tokens(text, field).filter((token) => wanted.has(token))).size;
    const parts = entry.sections.map((part, place) => {
      const title = place ? part.title : entry.title; // what stands above the first section is of the whole page
      return { ...part, hits: count(part.text, "text") + 1.5 * count(title, "headings") };
    });
    const best = parts.reduce((a, b) => (b.hits > a.hits + 0.5 ? b : a));
    const sentences = (best.text || entry.sections[0].text).match(/.+?[.?!:](?=\s|$)\s*|.+$/g) ?? [];
    const hits = sentences.map((sentence) => count(sentence, "text"));
    const start = best.text.length <= LONGEST ? 0 : hits.indexOf(Math.max(...hits));
    let text = sentences[start] ?? "";
    for (const sentence of sentences.slice(start + 1)) {
      if (text.length + sentence.length > LONGEST) break;
      text += sentence;
    }
    if (text.length > LONGEST) text = `${text.slice(0, LONGEST).replace(/\S*$/, "")}…`;
    return { anchor: best.anchor, heading: best.title.split(" · ")[0], text };
  };

  // Returns results, the best first; what the gallery lacks of what is asked; and words that hardly any page has
  const find = (query, typing) => {
    const words = read(query);
    const results = rank(words, typing);
    const best = results[0]?.score;
    const missing = searchIndex.missing.find(({ asked }) => asked.some((name) => has(query, name)));
    const place = results.findIndex(({ entry }) => entry.page === "faq" && entry.sections[0].anchor === missing?.faq);
    if (place >= 0 && results[place].score > NEAR * best) {
      results.unshift(...results.splice(place, 1));
      return { results, lacks: missing.name, rare: "" };
    }
    const { lacks, rare } = unknown(words.asked, results);
    return { results, lacks: lacks && `“${lacks}”`, rare };
  };

  return { find, excerpt, ready };
})();

// The page of the search
document.addEventListener("DOMContentLoaded", () => {
  const field = document.querySelector(".search-here input");
  const list = document.getElementById("search-results");
  const status = document.querySelector(".search-here ~ [role=status]");
  const SHOWN = 20; // results
  const WEAKEST = 0.03; // of the best one's score

  const element = (tag, properties, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };
  const item = (result) => {
    const { anchor, heading, text } = search.excerpt(result);
    const { page, title, kind } = result.entry;
    const link = element(
      "a",
      { href: `${page}.html${anchor && `#${anchor}`}` },
      heading ? `${title}: ${heading}` : title,
    );
    return element(
      "li",
      {},
      link,
      element("span", { className: "kind" }, kind),
      element("p", { className: "context" }, text),
    );
  };
  const show = (typing) => {
    const query = field.value.trim();
    const { results, lacks, rare } = query ? search.find(query, typing) : { results: [] };
    const shown = results.filter(
      ({ score }, place) => place < SHOWN && (place < 3 || score > WEAKEST * results[0].score),
    );
    list.replaceChildren(...shown.map(item));
    const count = shown.length === 1 ? "1 result" : `${shown.length || "No"} results`;
    const lack = `The gallery has no page about ${lacks} yet.`;
    const nearest = lacks && shown.length ? `${lack} The nearest of what it has: ${count}.` : lack;
    const found = rare ? `${count}. Hardly any page mentions “${rare}”.` : `${count}.`;
    status.textContent = query && (lacks ? nearest : found);
    document.title = query ? `${query} - Search` : "Search";
    if (location.protocol === "file:") return; // there the address must stay
    const address = new URL(location);
    address.search = query && new URLSearchParams({ q: query });
    history.replaceState(null, "", address);
  };

  let waiting;
  field.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(show, 150, true);
  });
  field.form.addEventListener("submit", (event) => {
    event.preventDefault();
    clearTimeout(waiting);
    show();
    list.querySelector("a")?.click();
  });
  document.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const places = [field, ...list.querySelectorAll("a")];
    const place = places.indexOf(document.activeElement);
    if (step && place >= 0 && places[place + step]) {
      event.preventDefault();
      places[place + step].focus();
    }
  });
  field.value = new URLSearchParams(location.search).get("q") ?? "";
  if (field.value) status.textContent = "Searching …";
  search.ready.then(() => show());
});
