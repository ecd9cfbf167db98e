"use strict";
// What was said, as text: messages, folded thinking, calls of tools, pictures of the data; and what differs between answers.

function said(part, generated, marked) {
  if (part.kind === "thinking") {
    return el("details", { class: "thinking" }, el("summary", {}, "thinking, " + num(part.text.length) + " characters"), el("pre", {}, part.text));
  }
  if (part.kind === "call") {
    return el("div", { class: "call" }, el("strong", {}, "calls " + (part.name || "?")), el("pre", {}, part.text));
  }
  if (part.kind === "picture" && !generated && /^data:image\/(png|jpeg|gif|webp);base64,/.test(part.text)) {
    const picture = document.createElement("img");
    picture.alt = "a picture of the prompt";
    picture.src = part.text;
    return picture;
  }
  return el("pre", {}, marked || part.text);
}

function message(each, marks = null) {
  const parts = each.parts.map((part, number) => said(part, each.generated, marks && marks[number]));
  return el("article", { class: "message " + (each.generated ? "generated" : "given") },
    el("h3", {}, each.role || "no role", each.generated ? el("span", { class: "tag" }, "generated") : null), parts);
}

function words(text) {
  return text.split(/(\s+)/);
}

const COMPARED_WORDS = 700;

// Which words of b are not in a, by the longest common subsequence; long texts by their common start and end
function differing(a, b) {
  const marks = new Array(b.length).fill(false);
  let start = 0, end = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const left = a.slice(start, a.length - end), right = b.slice(start, b.length - end);
  if (left.length > COMPARED_WORDS || right.length > COMPARED_WORDS) return marks.fill(true, start, b.length - end);
  const table = Array.from({ length: left.length + 1 }, () => new Uint16Array(right.length + 1));
  for (let i = left.length - 1; i >= 0; i--)
    for (let j = right.length - 1; j >= 0; j--)
      table[i][j] = left[i] === right[j] ? table[i + 1][j + 1] + 1 : Math.max(table[i + 1][j], table[i][j + 1]);
  for (let i = 0, j = 0; j < right.length; ) {
    if (i < left.length && left[i] === right[j]) { i++; j++; }
    else if (i < left.length && table[i + 1][j] >= table[i][j + 1]) i++;
    else marks[start + j++] = true;
  }
  return marks;
}

function marked(text, other) {
  const shown = words(text), marks = differing(words(other), shown);
  return shown.map((word, number) => (marks[number] && word.trim() ? el("mark", {}, word) : word));
}
