"use strict";
// A sample: as a conversation, as tokens with a colour by figure, as a tree of turns, and where it came from and went.

const COLOURINGS = {
  logprob: "log-probability", gap: "engine minus trainer", entropy: "entropy", advantage: "advantage", mask: "in the loss", version: "weight version", segment: "segment",
};

async function sampleView() {
  const at = { iteration: place.iteration, sample: place.sample };
  const [sample, lines] = await Promise.all([ask("sample", at), ask("lineage", at)]);
  const number = sample.neighbours.indexOf(sample.sample);
  const step = (offset, said) => {
    const other = sample.neighbours[number + offset];
    return other ? link([place.run, place.iteration, sample.group, other], said) : null;
  };
  const tabs = { conversation: () => sample.messages.map((each) => message(each)), tokens: tokensOf, turns: turnsOf };
  const panel = el("div", { id: "panel" });
  const chosen = new URLSearchParams(place.query).get("as") || "conversation";
  const buttons = Object.keys(tabs).map((name) => el("button", { "aria-pressed": String(name === chosen), on: { click: () => show(name) } }, name));
  const show = async (name) => {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.textContent === name));
    if (!EMBEDDED) history.replaceState(null, "", address(place.run, place.iteration, sample.group, sample.sample) + "?as=" + name);
    panel.replaceChildren("…");
    const shown = await Promise.resolve(tabs[name](at)).catch((error) => failure(error));
    panel.replaceChildren(...fill(el("div"), [shown]).childNodes);
  };
  const shown = el("div", {}, el("p", { class: "buttons", role: "group", "aria-label": "form" }, "as ", buttons), panel);
  show(chosen in tabs ? chosen : "conversation");
  return [
    el("h1", {}, "Sample " + short(sample.sample)), troubles(sample.problems),
    el("p", {}, step(-1, "← the one before"), " ", step(1, "the next one →"), " ", link([place.run, place.iteration, sample.group], "its group")),
    facts({ worth: worth(sample.figures), "reference answer": sample.label, "answer found": sample.figures.answer, metadata: sample.metadata,
      "why it failed": sample.figures.reason, "reward that it gave itself": sample.session.session_reward ?? null, engine: sample.figures.engine, seed: sample.seed, turns: sample.turns,
      seconds: sample.timings.generate_s ? num(sample.timings.generate_s, 3) : null }),
    rewardParts(sample), lineageOf(lines), section("What was said", shown),
  ];
}

function lineageOf(lines) {
  const drawn = lines.drawn.source === undefined ? null : "drawn from " + lines.drawn.source + ", row " + lines.drawn.row + (lines.drawn.epoch ? ", epoch " + lines.drawn.epoch : "");
  const stepLink = (each) => link([place.run, "-", "step", each.version], "step that made version " + each.version);
  const versions = lines.versions.map((each) => (each.version > 0 && each.iteration ? [" by ", link([place.run, "-", "step", each.version], "weight version " + each.version)] : " by the weights from before training"));
  const trained = lines.trained.length ? lines.trained.map((each) => ["→ trained in iteration ", link([place.run, each.iteration], each.iteration), ": ", stepLink(each), " "])
    : "→ " + (lines.verdict || "no verdict yet") + (lines.reason ? ": " + lines.reason : "") + ", not trained";
  return section("Where it came from, where it went", el("p", { class: "lineage" }, drawn, drawn ? " → " : "", "generated", versions,
    lines.reused_from ? [" in iteration ", link([place.run, lines.reused_from], lines.reused_from)] : null, " ", trained));
}

const HUES = [210, 130, 40, 280, 0, 180, 320, 90];

function colourOf(kind, value, largest) {
  if (value === null || value === undefined) return null;
  if (kind === "version" || kind === "segment") return "hsl(" + HUES[Math.abs(Math.round(value)) % HUES.length] + " 70% 50% / 0.30)";
  if (kind === "mask") return value ? "hsl(130 60% 45% / 0.25)" : "hsl(0 0% 50% / 0.35)";
  const share = Math.min(1, Math.abs(value) / (largest || 1));
  if (kind === "logprob" || kind === "entropy") return "hsl(20 85% 50% / " + (0.75 * share).toFixed(3) + ")";
  return (value >= 0 ? "hsl(130 60% 40% / " : "hsl(350 75% 50% / ") + (0.75 * share).toFixed(3) + ")";
}

async function tokensOf(at) {
  const first = Number(new URLSearchParams(place.query).get("first") || 0);
  const row = await ask("tokens", first ? { ...at, first } : at);
  let kind = "logprob", current = Math.max(0, Math.min(row.prompt - row.first, row.ids.length - 1));
  const said = el("p", { role: "status", class: "numbers" });
  const spans = row.ids.map((id, number) => {
    const text = row.texts ? row.texts[number] : id + " ";
    return el("span", { "data-at": number, class: row.first + number < row.prompt ? "prompt" : null }, text === "" ? "·" : text);
  });
  const numbers = (number) => {
    const values = Object.keys(COLOURINGS).filter((name) => row.values[name]).map((name) => COLOURINGS[name] + " " + num(row.values[name][number], 5));
    return "token " + (row.first + number) + (row.first + number < row.prompt ? " of the prompt" : "") + ", id " + row.ids[number] + ": " + values.join(", ");
  };
  const choose = (number, scroll) => {
    spans[current] && spans[current].classList.remove("current");
    current = Math.max(0, Math.min(number, spans.length - 1));
    spans[current].classList.add("current");
    said.textContent = plain(numbers(current));
    if (scroll) spans[current].scrollIntoView({ block: "nearest" });
  };
  const box = el("div", { class: "tokens", tabindex: "0", role: "application", "aria-label": "tokens: arrow keys go from one to the next" }, spans);
  box.addEventListener("mouseover", (event) => event.target.dataset.at && choose(Number(event.target.dataset.at), false));
  box.addEventListener("click", (event) => event.target.dataset.at && choose(Number(event.target.dataset.at), false));
  box.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    choose(Number.isFinite(move) ? current + move : move > 0 ? spans.length - 1 : 0, true);
  });
  const key = el("p", { class: "note" });
  const paint = (name) => {
    kind = name;
    const values = row.values[kind];
    const largest = Math.max(0, ...(values || []).filter((value) => value !== null).map(Math.abs));
    spans.forEach((span, number) => {
      const colour = values && colourOf(kind, values[number], kind === "logprob" ? Math.max(largest, 3) : largest);
      span.style.setProperty("background-color", colour || "transparent");
      span.classList.toggle("out", Boolean(kind === "mask" && values && values[number] === 0));
    });
    key.textContent = plain(values ? COLOURINGS[kind] + ": strongest at " + num(largest) : COLOURINGS[kind] + ": " + row.missing[kind]);
  };
  const names = Object.keys(COLOURINGS);
  const chooser = el("label", {}, "coloured by ", el("select", { on: { change: (event) => paint(event.target.value) } },
    names.map((name) => el("option", { value: name, selected: name === kind }, COLOURINGS[name] + (row.values[name] ? "" : " (not stored)")))));
  paint(kind);
  if (spans.length) choose(current, false);
  const more = [];
  const size = row.ids.length;
  if (row.first > 0) more.push(el("a", { href: address(place.run, place.iteration, place.group, place.sample) + "?as=tokens&first=" + Math.max(0, row.first - size) }, "← tokens before"));
  if (row.first + size < row.count) more.push(" ", el("a", { href: address(place.run, place.iteration, place.group, place.sample) + "?as=tokens&first=" + (row.first + size) }, "tokens after →"));
  return [el("p", {}, chooser, " ", num(row.count) + " tokens, " + num(row.prompt) + " of them the prompt's", row.texts ? null : "; the run's tokenizer is not found, so ids are shown"), key, said, box, EMBEDDED ? null : el("p", {}, more)];
}

async function turnsOf(at) {
  const branches = await ask("turns", at);
  if (!branches.length) return el("p", {}, "It has one turn, and none is stored by itself.");
  return el("ul", { class: "tree" }, branches.map((branch) => el("li", {}, el("strong", {}, "branch " + branch.branch + (branch.name ? ", " + branch.name : "")),
    branch.parent === null ? null : " from branch " + branch.parent + " after " + branch.after + " turns",
    el("ol", {}, branch.events.map((event) => el("li", { class: event.kind }, event.kind === "call"
      ? [el("strong", {}, "calls " + event.tool), event.failed ? el("span", { class: "tag" }, "failed") : null, el("pre", {}, event.arguments || ""), el("p", {}, "answer"), el("pre", {}, event.text)]
      : [el("strong", {}, "turn " + event.event + (event.segment ? ", segment " + event.segment : "")), " ", num(event.tokens) + " tokens, ended by " + (event.ended || "?") + (event.versions.length ? ", version " + event.versions.join(", ") : ""),
        event.new ? el("details", {}, el("summary", {}, "what was new to it"), el("pre", {}, event.new)) : null, el("pre", {}, event.text)]))))));
}
