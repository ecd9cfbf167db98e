"use strict";
// Elements from names and texts. Every text becomes a text node: nothing that was stored is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";
const stored = document.getElementById("stored");
const EMBEDDED = stored ? JSON.parse(stored.textContent) : null;

// Characters that move a cursor or turn the direction of writing, as their escapes
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

function plain(text) {
  return String(text).replace(UNSEEN, (found) => {
    const code = found.charCodeAt(0);
    return code < 256 ? "\\x" + code.toString(16).padStart(2, "0") : "\\u" + code.toString(16).padStart(4, "0");
  });
}

function fill(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(plain(child)));
  }
  return element;
}

function put(element, options) {
  for (const [name, value] of Object.entries(options || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, call] of Object.entries(value)) element.addEventListener(event, call);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else element.setAttribute(name, value === true ? "" : plain(value));
  }
  return element;
}

function el(name, options, ...children) {
  return fill(put(document.createElement(name), options), children);
}

function svg(name, options, ...children) {
  return fill(put(document.createElementNS(SVG, name), options), children);
}

// The address of a place in the page
function address(...parts) {
  const path = "/" + parts.map((part) => encodeURIComponent(part)).join("/");
  return EMBEDDED ? "#" + path : path;
}

function link(parts, ...children) {
  return el("a", { href: address(...parts) }, ...children);
}

// An address outside of the page, as a run's record has it
function outside(url) {
  return /^https?:\/\//.test(url) ? el("a", { href: url, rel: "noreferrer noopener", target: "_blank" }, url) : url;
}

function num(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
}

function table(columns, rows, options = {}) {
  const head = el("tr", {}, columns.map((name) => el("th", { scope: "col" }, name)));
  const body = rows.map((row) => el("tr", {}, row.map((cell) => el("td", {}, cell))));
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": options.label || "table" },
    el("table", {}, el("thead", {}, head), el("tbody", {}, body)));
}

function section(title, ...children) {
  return el("section", {}, el("h2", {}, title), ...children);
}

function facts(values) {
  const shown = Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el("dl", { class: "facts" }, shown.map(([name, value]) => [
    el("dt", {}, name), el("dd", {}, value instanceof Node || Array.isArray(value) ? value : outside(String(value)))]));
}

function choice(label, names, chosen, then) {
  const options = names.map((name) => el("option", { value: name, selected: name === chosen }, name));
  return el("label", {}, label + " ", el("select", { on: { change: (event) => then(event.target.value) } }, options));
}

function troubles(problems) {
  if (!problems || !problems.length) return null;
  const lines = problems.map((each) => el("li", {}, each.where ? el("code", {}, each.where) : null, " ", each.what,
    each.remedy ? "; " + each.remedy : ""));
  return el("div", { class: "problems", role: "alert" }, el("strong", {}, "Not all of it is shown: "), el("ul", {}, lines));
}

function short(id) {
  const tail = /-\d{4}(\.\d+)?$/.exec(id);
  if (!tail) return id.length > 14 ? id.slice(0, 12) + "…" : id;
  const group = id.slice(0, tail.index);
  return (group.length > 10 ? group.slice(0, 8) + "…" : group) + tail[0];
}

function groupOf(sample) {
  return sample.split(".")[0].replace(/-\d{4}$/, "");
}

async function ask(what, values = {}, run = place.run) {
  const query = new URLSearchParams(Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  query.sort();
  const key = run + "/" + what + "?" + query;
  if (EMBEDDED) {
    if (key in EMBEDDED.answers) return EMBEDDED.answers[key];
    throw { what: "is not in this file", where: what, remedy: "open the run with `millrace view`" };
  }
  return fetched("/-/api/" + encodeURIComponent(run) + "/" + what + "?" + query);
}

async function fetched(url) {
  const answer = await fetch(url, { headers: { accept: "application/json" } }).catch(() => {
    throw { what: "the server does not answer", where: "millrace view", remedy: "start it again" };
  });
  const content = await answer.json().catch(() => ({ error: { what: "answered " + answer.status, where: url, remedy: "" } }));
  if (content && content.error) throw content.error;
  return content;
}
