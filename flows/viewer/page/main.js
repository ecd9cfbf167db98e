"use strict";
// Which view an address names, and following links without loading the page again.

let place = { run: "" };
let about = { run: "", follow: false };
let turn = 0;

const SPECIAL = {
  step: [stepView, "version"], account: [accountView], timeline: [timelineView], sql: [sqlView], compare: [compareView], evaluations: [evaluationsView, "set", "done"],
};
const TABS = { evaluations: "Evaluations", account: "Tokens", timeline: "Timeline", sql: "SQL", compare: "Compare" };

function named() {
  const path = EMBEDDED ? location.hash.slice(1) || EMBEDDED.first : location.pathname + location.search;
  const [where, query = ""] = path.split("?");
  const parts = where.split("/").filter(Boolean).map(decodeURIComponent);
  const found = { run: parts[0] || "", query, view: runsView, title: [] };
  if (parts[1] === "-" && Object.hasOwn(SPECIAL, parts[2])) {
    const [view, ...names] = SPECIAL[parts[2]];
    names.forEach((name, number) => { found[name] = parts[3 + number]; });
    return { ...found, view: found.done !== undefined ? evaluationView : view, title: parts.slice(2) };
  }
  const [run, iteration, group, sample] = parts;
  const view = sample ? sampleView : group ? groupView : iteration ? iterationView : run ? runView : runsView;
  return { ...found, iteration, group, sample, view, title: parts.slice(1) };
}

function failure(error) {
  if (error instanceof Error) throw error;
  return troubles([{ where: error.where, what: error.what, remedy: error.remedy }]);
}

function trail() {
  const parts = [[place.run], [place.run, place.iteration], [place.run, place.iteration, place.group], [place.run, place.iteration, place.group, place.sample]];
  const names = [place.run, place.iteration && "iteration " + place.iteration, place.group && "group " + short(place.group), place.sample && "sample " + short(place.sample)];
  const links = parts.filter((each) => each.every((part) => part !== undefined && part !== "")).map((each, number) => [number ? " / " : null, link(each, names[number])]);
  return [EMBEDDED ? el("strong", {}, "millrace") : el("a", { href: "/" }, "millrace"), links.length ? " / " : null, links];
}

async function render(keep = false) {
  const mine = ++turn;
  place = named();
  const main = document.getElementById("main");
  document.title = plain(["millrace", place.run, ...place.title.map(short)].filter(Boolean).join(" · "));
  document.getElementById("trail").replaceChildren(...fill(el("div"), [trail()]).childNodes);
  const tabs = place.run && !EMBEDDED ? Object.entries(TABS).map(([name, title]) => link([place.run, "-", name], title)) : [];
  document.getElementById("tabs").replaceChildren(...tabs);
  if (!keep) main.classList.add("waiting");
  let shown;
  try {
    shown = await place.view();
  } catch (error) {
    shown = [el("h1", {}, "Not shown"), failure(error)];
  }
  if (mine !== turn) return;
  const at = scrollY;
  main.replaceChildren(...fill(el("div"), [shown]).childNodes);
  main.classList.remove("waiting");
  main.dataset.shown = location.href;
  if (keep) scrollTo(0, at);
}

function go(where) {
  if (EMBEDDED) { location.hash = where.slice(1); return; }
  history.pushState(null, "", where);
  scrollTo(0, 0);
  render().then(() => document.getElementById("main").focus({ preventScroll: true }));
}

document.addEventListener("click", (event) => {
  const anchor = event.target.closest && event.target.closest("a");
  if (!anchor || EMBEDDED || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  const where = anchor.getAttribute("href");
  if (!where || !where.startsWith("/") || anchor.target) return;
  event.preventDefault();
  go(where);
});
addEventListener("popstate", () => render());
if (EMBEDDED) addEventListener("hashchange", () => render());

async function follow() {
  const live = place.view === runView || place.view === iterationView;
  if (live && !document.hidden && !["SELECT", "INPUT", "TEXTAREA"].includes(document.activeElement.tagName)) await render(true);
  setTimeout(follow, 3000);
}

(async () => {
  if (!EMBEDDED) about = await fetched("/-/api").catch(() => about);
  await render();
  if (about.follow) setTimeout(follow, 3000);
})();
