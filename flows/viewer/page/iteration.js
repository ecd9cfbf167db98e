"use strict";
// An iteration: what was dropped, its samples by length and reward, notable ones, its groups. A group: its answers side by side.

function sampleAt(sample) {
  return [place.run, place.iteration, groupOf(sample), sample];
}

async function iterationView() {
  const query = new URLSearchParams(place.query);
  const asked = { iteration: place.iteration, order: query.get("order"), shown: query.get("shown"), page: query.get("page"), whole: query.get("whole") };
  const view = await ask("iteration", asked);
  const open = (changes) => go(address(place.run, place.iteration) + "?" + new URLSearchParams(Object.entries({ ...asked, iteration: null, page: null, ...changes }).filter(([, value]) => value)));
  const verdicts = view.verdicts.map((row) => [
    row.verdict || "no verdict yet", row.reason || "–", num(row.samples), num(row.groups), link([place.run, place.iteration, row.example], "one of them")]);
  const notable = Object.entries(view.notable).filter(([, rows]) => rows.length).map(([name, rows]) => [
    name, rows.map((row) => [link(sampleAt(row.sample_id), "reward " + num(row.reward) + ", " + num(row.length) + " tokens"), el("br")])]);
  const groups = view.groups.map((row) => [
    link([place.run, place.iteration, row.group_id], short(row.group_id)), row.source || "–", num(row.kept) + " of " + num(row.samples),
    num(row.reward, 3), num(row.least, 3) + " … " + num(row.most, 3), num(row.length, 3), num(row.longest),
    row.kept ? "kept" : (row.verdict || "open") + (row.reason ? ": " + row.reason : ""), row.version === null ? "–" : row.version]);
  const pages = Math.ceil(view.groups_found / 50);
  const neighbours = [view.iteration > 1 ? link([place.run, view.iteration - 1], "← iteration " + (view.iteration - 1)) : null, " ", link([place.run, view.iteration + 1], "iteration " + (view.iteration + 1) + " →")];
  return [
    el("h1", {}, "Iteration " + view.iteration), troubles(view.problems), EMBEDDED ? null : el("p", {}, neighbours),
    el("p", {}, view.committed ? "committed" : "open: shown as far as it has come", ", ", num(view.samples), " samples", view.unused ? "; " + num(view.unused) + " groups of the reserve were not needed" : ""),
    view.partial ? el("p", { class: "note" }, "Rewards and lengths are in many or large files; without them means and verdicts are shown. ",
      el("button", { on: { click: () => open({ whole: 1 }) } }, "Read them too")) : null,
    el("div", { class: "charts" }, scatter(view, sampleAt), section("Notable samples", table(["", "samples"], notable, { label: "notable samples" }))),
    section("What became of them", table(["verdict", "reason", "samples", "groups", ""], verdicts, { label: "verdicts" })),
    section("Groups", EMBEDDED ? null : el("p", {}, choice("order", ["drawn", "reward", "worst", "spread", "length"], query.get("order") || "drawn", (value) => open({ order: value })), " ",
      choice("show", ["all", "kept", "dropped", "zero variance", "not scored"], query.get("shown") || "all", (value) => open({ shown: value }))),
      table(["group", "source", "kept", "reward", "from … to", "length", "longest", "verdict", "version"], groups, { label: "groups" }),
      pages > 1 && !EMBEDDED ? el("p", {}, num(view.groups_found) + " groups. Page ", choice("", [...Array(Math.min(pages, 500)).keys()].map((page) => String(page + 1)), String(view.page + 1), (value) => open({ page: value - 1 }))) : null),
    differences(view),
    section("Figures", el("details", {}, el("summary", {}, Object.keys(view.metrics).length + " figures"),
      table(["figure", "value"], Object.entries(view.metrics).sort().map(([name, value]) => [name, num(value, 6)]), { label: "figures" }))),
    EMBEDDED ? null : checks(view.iteration),
  ];
}

function differences(view) {
  const rows = view.unusual.map((each) => [each.name, num(each.value), num(each.usual), (each.value > each.usual ? "+" : "") + num(each.value - each.usual)]);
  return view.iteration < 2 || !view.committed ? null : section("What it did differently", rows.length
    ? table(["figure", "iteration " + view.iteration, "usual before", "difference"], rows, { label: "what it did differently" })
    : el("p", {}, "No figure differs from the iterations before."));
}

function checks(iteration) {
  const shown = el("div", { role: "status" });
  const check = async () => {
    shown.replaceChildren("reading every file …");
    const found = await ask("verify", { iteration }).catch((error) => ({ problems: [error.what] }));
    shown.replaceChildren(found.problems.length ? el("ul", { class: "problems" }, found.problems.map((each) => el("li", {}, each))) : "every file has the hash that was committed");
  };
  return section("Files", el("p", {}, "What is shown was checked by size, rows and the checksum of each page. ", el("button", { on: { click: check } }, "Compare every hash")), shown);
}

function answerText(answer) {
  return answer.messages.flatMap((each) => each.parts).map((part) => part.text).join("\n");
}

function worth(figures) {
  return ["reward " + num(figures.reward), figures.advantage === null || figures.advantage === undefined ? null : "advantage " + num(figures.advantage, 3),
    num(figures.length) + " tokens", figures.status, figures.verdict ? figures.verdict + (figures.reason ? ": " + figures.reason : "") : null].filter(Boolean).join(", ");
}

function rewardParts(answer) {
  const numbers = Object.entries(answer.reward_parts).map(([name, value]) => [name, num(value)]);
  const texts = Object.entries(answer.reward_texts).map(([name, value]) => [name, el("pre", {}, value)]);
  return numbers.length + texts.length ? table(["part of the reward", ""], [...numbers, ...texts], { label: "reward parts" }) : null;
}

async function groupView() {
  const group = await ask("group", { iteration: place.iteration, group: place.group });
  const first = group.answers[0];
  const against = group.answers.find((each) => each.sample === new URLSearchParams(place.query).get("against")) || first;
  const columns = group.answers.map((answer) => el("div", { class: "answer" },
    el("h3", {}, link([place.run, place.iteration, place.group, answer.sample], "sample " + answer.index + (answer.role ? " (" + answer.role + ")" : ""))),
    el("p", {}, worth(answer.figures)),
    answer.messages.map((each, at) => message(each, answer === against ? null : each.parts.map((part, number) => {
      const other = against.messages[at] && against.messages[at].parts[number];
      return part.kind === "text" && other ? marked(part.text, other.text) : null;
    }))),
    answer.figures.answer === null || answer.figures.answer === undefined ? null : el("p", {}, "answer found: ", el("code", {}, answer.figures.answer || "none")),
    rewardParts(answer)));
  const reasons = [...new Set(group.answers.map((each) => each.figures.verdict + (each.figures.reason ? ": " + each.figures.reason : "")))];
  return [
    el("h1", {}, "Group " + short(group.group)), troubles(group.problems),
    facts({ source: group.source, verdict: reasons.join("; "), "reference answer": group.label, metadata: group.metadata }),
    section("Prompt", group.prompt.map((each) => message(each))),
    section("Answers side by side", EMBEDDED ? null : el("p", {}, choice("marked: what is not in sample", group.answers.map((each) => String(each.index)), String(against.index), (value) =>
      go(address(place.run, place.iteration, place.group) + "?against=" + encodeURIComponent(group.answers.find((each) => String(each.index) === value).sample)))),
      el("div", { class: "side", tabindex: "0", role: "region", "aria-label": "answers" }, columns)),
  ];
}
