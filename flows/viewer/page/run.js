"use strict";
// The run: its facts, curves, table of iterations; the list of runs; runs side by side.

async function runView() {
  const view = await ask("overview");
  const at = (point) => (point[0] > 0 ? [view.run, point[0]] : null);
  const curves = Object.entries(view.curves).map(([name, points]) => chart(name, { [name]: points }, { at }));
  const sets = chart("held-out sets", view.held_out, { at: (point, name) => (name.includes("/") ? null : [view.run, "-", "evaluations", name, point[0]]), unit: "iterations trained" });
  const longest = Math.max(1e-9, ...view.iterations.map((line) => Object.values(line.phases).reduce((sum, value) => sum + value, 0)));
  const names = ["reward", "length", "staleness", "loss", "gap", "tokens/s"].filter((name) => view.iterations.some((line) => name in line.figures));
  const rows = [...view.iterations].reverse().slice(0, 300).map((line) => [
    link([view.run, line.iteration], line.committed ? line.iteration : line.iteration + " (open)"),
    ...names.map((name) => num(line.figures[name])),
    Object.entries(line.dropped).map(([name, count]) => name.replaceAll("_", " ") + " " + count).join(", ") || "–",
    Object.keys(line.phases).length ? phases(line, longest) : "–"]);
  const generated = view.tokens.generated;
  const account = Object.entries(view.tokens).map(([name, count]) => [name, num(count), generated ? (100 * count / generated).toFixed(1) + " %" : "–"]);
  return [
    el("h1", {}, view.run), troubles(view.problems), facts(view.facts),
    section("Curves", el("div", { class: "charts" }, sets, curves), figureChoice(view)),
    section("Iterations", table(["iteration", ...names, "dropped groups", "time by task"], rows, { label: "iterations" }),
      view.iterations.length > 300 ? el("p", {}, "The newest 300 are listed; a curve leads to any other.") : null,
      jump(view)),
    generated ? section("Tokens", table(["tokens", "count", "share"], account, { label: "tokens" })) : null,
  ];
}

function figureChoice(view) {
  if (EMBEDDED || !view.names.length) return null;
  const shown = el("div", { class: "charts" });
  const draw = async (name) => {
    const found = await ask("figure", { name });
    shown.replaceChildren(chart(name, { [name]: found.points }, { at: (point) => [view.run, point[0]] }) || "no such figure");
  };
  return el("div", {}, choice("Another figure", ["", ...view.names], "", (name) => name && draw(name)), shown);
}

function jump(view) {
  if (EMBEDDED) return null;
  const field = el("input", { type: "number", min: 1, name: "iteration", "aria-label": "iteration", size: 6 });
  return el("form", { on: { submit: (event) => { event.preventDefault(); if (field.value) go(address(view.run, field.value)); } } },
    el("label", {}, "Open iteration ", field), " ", el("button", {}, "Open"));
}

async function runsView() {
  const names = await fetched("/-/api/runs");
  return [el("h1", {}, "Runs"), el("ul", {}, names.map((name) => el("li", {}, link([name], name))))];
}

async function compareView() {
  const query = new URLSearchParams(location.search);
  const known = await fetched("/-/api/runs");
  const chosen = (query.get("runs") || place.run).split(",").filter((name) => known.includes(name));
  const by = query.get("by") || "iteration", name = query.get("name") || "reward/mean";
  const found = await fetched("/-/api/compare?" + new URLSearchParams({ runs: chosen.join(","), name }));
  const open = (changes) => go(address(place.run, "-", "compare") + "?" + new URLSearchParams({ runs: chosen.join(","), by, name, ...changes }));
  const column = { iteration: 0, tokens: 1, hours: 2 }[by] ?? 0;
  const lines = Object.fromEntries(Object.entries(found.points).map(([run, points]) => [run, points.map((point) => [point[column], point[3], point[0]])]));
  const boxes = known.map((run) => el("label", { class: "box" }, el("input", { type: "checkbox", checked: chosen.includes(run), on: { change: (event) =>
    open({ runs: (event.target.checked ? [...chosen, run] : chosen.filter((each) => each !== run)).join(",") }) } }), run));
  const fields = Object.entries(found.differs).map(([field, values]) => [el("code", {}, field), ...chosen.map((run) => JSON.stringify(values[run] ?? null))]);
  return [
    el("h1", {}, "Runs side by side"), el("fieldset", {}, el("legend", {}, "runs"), boxes),
    el("p", {}, choice("figure", found.names, name, (value) => open({ name: value })), " ", choice("by", ["iteration", "tokens", "hours"], by, (value) => open({ by: value }))),
    chart(name, lines, { unit: by, at: (point, run) => [run, point[2]] }) || el("p", {}, "None of them has this figure."),
    section("What differs in their configuration", fields.length ? table(["field", ...chosen], fields, { label: "configuration" }) : el("p", {}, "Nothing.")),
  ];
}
