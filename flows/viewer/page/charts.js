"use strict";
// Pictures in SVG: lines by iteration, samples by length and reward, bars of time.

const COLOURS = ["#1f77b4", "#d1495b", "#2e8b57", "#b8860b", "#7b52ab", "#008b8b", "#c06014", "#555"];

function scale(least, most, from, to) {
  const span = most - least || 1;
  return (value) => from + ((value - least) / span) * (to - from);
}

// Lines of points [x, y]; at: what a point leads to. lines: {name: points}
function chart(title, lines, { at = null, unit = "iteration" } = {}) {
  const names = Object.keys(lines).filter((name) => lines[name].length);
  if (!names.length) return null;
  const all = names.flatMap((name) => lines[name]);
  const xs = all.map((point) => point[0]), ys = all.map((point) => point[1]).filter(Number.isFinite);
  const low = Math.min(...ys), high = Math.max(...ys);
  const x = scale(Math.min(...xs), Math.max(...xs), 56, 470), y = scale(low, high, 130, 12);
  const picture = svg("svg", { viewBox: "0 0 480 156", role: "img", "aria-label": title + " from " + num(low) + " to " + num(high) },
    svg("line", { x1: 56, y1: 130, x2: 470, y2: 130, class: "axis" }), svg("line", { x1: 56, y1: 12, x2: 56, y2: 130, class: "axis" }),
    svg("text", { x: 50, y: 16, "text-anchor": "end" }, num(high)), svg("text", { x: 50, y: 132, "text-anchor": "end" }, num(low)),
    svg("text", { x: 56, y: 150 }, num(Math.min(...xs))), svg("text", { x: 470, y: 150, "text-anchor": "end" }, num(Math.max(...xs)) + " " + unit));
  names.forEach((name, number) => {
    const colour = COLOURS[number % COLOURS.length];
    const points = lines[name].filter((point) => Number.isFinite(point[1]));
    picture.append(svg("polyline", { points: points.map((point) => x(point[0]) + "," + y(point[1])).join(" "), fill: "none", stroke: colour, "stroke-width": 1.6 }));
    if (points.length > 600) return;
    for (const point of points) {
      const dot = svg("circle", { cx: x(point[0]), cy: y(point[1]), r: 3, fill: colour, class: "dot" },
        svg("title", {}, name + ", " + unit + " " + num(point[0]) + ": " + num(point[1])));
      const where = at && at(point, name);
      picture.append(where ? svg("a", { href: address(...where), tabindex: -1 }, dot) : dot);
    }
  });
  const legend = names.length > 1 ? el("p", { class: "legend" }, names.map((name, number) =>
    el("span", {}, el("i", { style: { background: COLOURS[number % COLOURS.length] } }), name))) : null;
  return el("figure", {}, el("figcaption", {}, title), picture, legend);
}

function verdictColour(verdict) {
  return { kept: COLOURS[0], dropped: COLOURS[1], deferred: COLOURS[3], returned: COLOURS[7] }[verdict] || COLOURS[4];
}

// Samples by length and reward; many are counted in cells
function scatter(view, at) {
  const { least = 0, most = 1, longest = 1 } = view.bounds;
  const x = scale(0, longest, 56, 470), y = scale(least, most, 200, 16);
  const picture = svg("svg", { viewBox: "0 0 480 232", role: "img", "aria-label": "reward by length of the samples" },
    svg("line", { x1: 56, y1: 206, x2: 470, y2: 206, class: "axis" }), svg("line", { x1: 56, y1: 10, x2: 56, y2: 206, class: "axis" }),
    svg("text", { x: 50, y: 20, "text-anchor": "end" }, num(most)), svg("text", { x: 50, y: 204, "text-anchor": "end" }, num(least)),
    svg("text", { x: 56, y: 222 }, "0"), svg("text", { x: 470, y: 222, "text-anchor": "end" }, num(longest) + " tokens"));
  const open = (sample, shape, said) => picture.append(svg("a", { href: address(...at(sample)), tabindex: -1 }, fill(shape, [svg("title", {}, said)])));
  for (const point of view.points || []) {
    open(point.sample_id, svg("circle", { cx: x(point.length || 0), cy: y(point.reward), r: 3.2, fill: verdictColour(point.verdict), class: "dot", "fill-opacity": 0.55 }),
      num(point.length) + " tokens, reward " + num(point.reward) + ", " + (point.verdict || "no verdict yet"));
  }
  const { across = 1, down = 1 } = view.bounds;
  const width = 414 / across, height = 184 / down;
  const largest = Math.max(1, ...(view.cells || []).map((cell) => cell.samples));
  for (const cell of view.cells || []) {
    open(cell.sample_id, svg("rect", { x: 56 + cell.x * width, y: 200 - (cell.y + 1) * height, width, height,
      fill: verdictColour(cell.kept * 2 >= cell.samples ? "kept" : "dropped"), "fill-opacity": 0.2 + 0.8 * Math.sqrt(cell.samples / largest) }),
      num(cell.samples) + " samples, " + num(cell.kept) + " kept; one of them at a click");
  }
  return el("figure", {}, el("figcaption", {}, "Reward by length"), picture);
}

const PHASE_COLOURS = { rollout: 0, reward: 2, filter: 3, train_step: 1, sync_weights: 4, checkpoint: 5, evaluate: 6, engines: 7, trainer: 7 };

// Seconds of an iteration's tasks, beside each other
function phases(line, longest) {
  const names = Object.keys(line.phases).filter((name) => line.phases[name] > 0);
  const bar = svg("svg", { viewBox: "0 0 300 12", class: "phases", role: "img", preserveAspectRatio: "none",
    "aria-label": names.map((name) => name + " " + num(line.phases[name], 3) + " s").join(", ") });
  let at = 0;
  for (const name of names) {
    const width = (line.phases[name] / longest) * 300;
    bar.append(svg("rect", { x: at, y: 0, width, height: 12, fill: COLOURS[PHASE_COLOURS[name] ?? 7] },
      svg("title", {}, name + ": " + num(line.phases[name], 3) + " s")));
    at += width;
  }
  return bar;
}
