// Markdown's blocks: text to DOM nodes, made by createElement and text alone. Unchanged blocks keep their
// nodes, so that an answer can be selected and read while it grows.

import { copyButton, el } from "./dom.js";
import { inline } from "./inline.js";

const DEPTH = 6; // limit of nested quotes and lists
// No two adjacent parts of an expression match the same characters, so hostile text takes linear time.
const FENCE = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/s;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +)(?=\S)(.*)$/;
const DELIMITERS = /^\|?(?: *:?-+:? *(?:\||$))+$/; // of a line without spaces around it

/** Splits lines into blocks {kind, lines, ...}; `lines` are the source. */
export function blocks(lines) {
  const found = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const block = fenced(lines, at) ?? single(lines[at]) ?? quoted(lines, at) ?? listed(lines, at)
      ?? tabled(lines, at) ?? paragraph(lines, at);
    block.lines = lines.slice(at, at + block.count);
    found.push(block);
    at += block.count;
  }
  return found;
}

function fenced(lines, at) {
  const open = FENCE.exec(lines[at]);
  if (!open) return null;
  let end = at + 1;
  const closes = (line) => {
    const text = line.trim();
    return text.length >= open[1].length && text === open[1][0].repeat(text.length) && /^ {0,3}\S/.test(line);
  };
  while (end < lines.length && !closes(lines[end])) end++;
  const code = lines.slice(at + 1, end).join("\n");
  return { kind: "code", language: open[2].trim(), code, count: Math.min(end + 1, lines.length) - at };
}

function single(line) {
  const heading = HEADING.exec(line);
  if (heading) {
    const text = heading[2].trimEnd().replace(/[ \t]#+$/, "").trimEnd();
    return { kind: "heading", level: heading[1].length, text, count: 1 };
  }
  return RULE.test(line) ? { kind: "rule", count: 1 } : null;
}

function quoted(lines, at) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  if (end === at) return null;
  return { kind: "quote", inner: lines.slice(at, end).map((l) => QUOTE.exec(l)[1]), count: end - at };
}

function listed(lines, at) {
  const first = ITEM.exec(lines[at]);
  if (!first || RULE.test(lines[at])) return null;
  const ordered = /\d/.test(first[2]);
  const indent = first[1].length;
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = itemOf(lines[end], ordered);
    const inside = indentOf(lines[end]) > indent;
    if (item && !inside) {
      const width = item[1].length + item[2].length + item[3].length;
      items.push({ width, lines: [item[4]] });
    } else if (inside) {
      const last = items.at(-1);
      last.lines.push(lines[end].slice(Math.min(indentOf(lines[end]), last.width)));
    } else if (!lines[end].trim() && end + 1 < lines.length && continues(lines[end + 1], indent, ordered)) {
      items.at(-1).lines.push("");
    } else {
      break;
    }
    end++;
  }
  return { kind: "list", ordered, start: ordered ? parseInt(first[2], 10) : 1, items, count: end - at };
}

const indentOf = (line) => (line.trim() ? /^ */.exec(line)[0].length : 0);

function itemOf(line, ordered) {
  const item = RULE.test(line) ? null : ITEM.exec(line);
  return item && /\d/.test(item[2]) === ordered ? item : null;
}

function continues(line, indent, ordered) {
  return indentOf(line) > indent || itemOf(line, ordered)?.[1].length === indent;
}

function cells(line) {
  const text = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return text.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function tabled(lines, at) {
  const next = lines[at + 1];
  if (!lines[at].includes("|") || !next?.includes("-") || !DELIMITERS.test(next.trim())) return null;
  const head = cells(lines[at]);
  const marks = cells(next);
  if (marks.length !== head.length) return null;
  const align = marks.map((m) => (m.endsWith(":") ? (m.startsWith(":") ? "center" : "right") : "left"));
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) end++;
  const rows = lines.slice(at + 2, end).map(cells).map((row) => head.map((_, i) => row[i] ?? ""));
  return { kind: "table", head, align, rows, count: end - at };
}

function paragraph(lines, at) {
  let end = at + 1;
  const kinds = [FENCE, HEADING, RULE, QUOTE, ITEM];
  const begins = (i) => kinds.some((kind) => kind.test(lines[i])) || tabled(lines, i);
  while (end < lines.length && lines[end].trim() && !begins(end)) end++;
  return { kind: "text", text: lines.slice(at, end).join("\n"), count: end - at };
}

// ---- as nodes

const MAKE = {
  text: (b) => el("p", { dir: "auto" }, ...inline(b.text)),
  heading: (b) => el(`h${Math.min(6, b.level + 2)}`, { dir: "auto" }, ...inline(b.text)), // h1, h2: the page
  rule: () => el("hr"),
  code: codeBlock,
  quote: (b, depth) => el("blockquote", { dir: "auto" }, ...nodes(b.inner, depth + 1)),
  list: list,
  table: table,
};

function codeBlock(b) {
  const code = el("code", {}, b.code);
  const name = el("span", { textContent: b.language });
  const caption = el("figcaption", {}, name, copyButton("Copy this code", () => code.textContent));
  return el("figure", { className: "code" }, caption, el("pre", { tabIndex: 0 }, code));
}

function list(b, depth) {
  const made = el(b.ordered ? "ol" : "ul", { dir: "auto", ...(b.ordered ? { start: b.start } : {}) });
  for (const item of b.items) {
    const inner = nodes(item.lines, depth + 1);
    const tight = inner[0]?.tagName === "P" && !item.lines.includes("");
    made.append(el("li", {}, ...(tight ? [...inner[0].childNodes, ...inner.slice(1)] : inner)));
  }
  return made;
}

function table(b) {
  const row = (texts, tag) => el("tr", {}, ...texts.map((text, i) =>
    el(tag, { className: b.align[i], ...(tag === "th" ? { scope: "col" } : {}) }, ...inline(text))));
  const body = b.rows.map((texts) => row(texts, "td"));
  const made = el("table", { dir: "auto" }, el("thead", {}, row(b.head, "th")), el("tbody", {}, ...body));
  return el("div", { className: "wide", tabIndex: 0, role: "region", "aria-label": "Table" }, made);
}

function nodes(lines, depth) {
  if (depth > DEPTH) return [el("p", { dir: "auto" }, lines.join("\n"))];
  return blocks(lines).map((block) => MAKE[block.kind](block, depth));
}

const shown = new WeakMap(); // container -> [{key, node}]

/** Shows `text` in `container`; nothing else may write to it. */
export function render(container, text) {
  const before = shown.get(container) ?? [];
  const now = blocks(text.split(/\r?\n/)).map((block, i) => {
    const key = `${block.kind}\n${block.lines.join("\n")}`;
    if (before[i]?.key === key) return before[i];
    const node = MAKE[block.kind](block, 0);
    if (before[i]) before[i].node.replaceWith(node);
    else container.append(node);
    return { key, node };
  });
  for (const { node } of before.slice(now.length)) node.remove();
  shown.set(container, now);
}
