// Markdown within a line: text to DOM nodes. Text always stays text.
// Links are http(s) and never fetched; pictures become links, too.

import { el } from "./dom.js";

const ESCAPED = /[\\`*_[\]#|~!()\-+.{}>]/; // characters that a backslash escapes
const DEPTH = 6; // limit of nested emphasis
const REACH = 2000; // characters that a construct may span: hostile text takes linear time
const LINK = new RegExp( // [text](url "title"); the url may contain paired parentheses
  String.raw`^\[((?:[^[\]\\]|\\.)*)\]\(\s*<?((?:[^\s<>()]|\([^\s<>()]*\))+)>?(?:\s+"[^"]*")?\s*\)`,
);
const BARE_URL = /^https?:\/\/[^\s<>"'`]+/i;

/** Returns a URL that a click may follow, or null. */
function href(text) {
  if (!/^https?:\/\//i.test(text)) return null;
  try {
    const url = new URL(text);
    return ["http:", "https:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function link(url, children) {
  const rel = "noopener noreferrer nofollow";
  return el("a", { href: url, title: url, target: "_blank", rel }, ...children);
}

/** Each reads a construct at text[at] and returns {nodes, end}, or null if there is none. */
function codeSpan(text, at) {
  const fence = /^`+/.exec(text.slice(at, at + REACH))[0];
  for (let end = text.indexOf(fence, at + fence.length); end >= 0 && end - at < REACH;) {
    let after = end + fence.length;
    if (text[after] !== "`") {
      const inner = text.slice(at + fence.length, end);
      const code = /^ .*[^ ].* $/s.test(inner) ? inner.slice(1, -1) : inner;
      return { nodes: [el("code", {}, code)], end: after };
    }
    while (text[after] === "`") after++;
    end = text.indexOf(fence, after);
  }
  return { nodes: [fence], end: at + fence.length };
}

function bracketed(text, at, depth) {
  const image = text[at] === "!";
  const part = text.slice(image ? at + 1 : at, at + REACH);
  const found = LINK.exec(part);
  const url = found && href(found[2]);
  if (!url) return null;
  const shown = found[1] || url;
  return {
    nodes: [link(url, image ? [shown] : inline(shown, depth + 1, true))],
    end: at + found[0].length + (image ? 1 : 0),
  };
}

function bareUrl(text, at) {
  if (at > 0 && /[\w/]/.test(text[at - 1])) return null;
  let found = BARE_URL.exec(text.slice(at, at + REACH))?.[0];
  if (!found) return null;
  found = found.replace(/[.,;:!?*_~\]]+$/, "");
  while (found.endsWith(")") && found.split(")").length > found.split("(").length) found = found.slice(0, -1);
  const url = href(found);
  return url && { nodes: [link(url, [found])], end: at + found.length };
}

function emphasis(text, at, depth) {
  const mark = text[at];
  let n = 1;
  while (n < 3 && text[at + n] === mark) n++;
  if (mark === "~" && n !== 2) return null;
  for (let count = mark === "~" ? 2 : n; count > 0; count--) {
    const made = emphasised(text, at, mark.repeat(count), depth);
    if (made) return made;
  }
  return null;
}

function emphasised(text, at, marks, depth) {
  const begin = at + marks.length;
  const word = /[\p{L}\p{N}]/u;
  if (!text[begin] || /\s/.test(text[begin])) return null;
  if (marks[0] === "_" && at > 0 && word.test(text[at - 1])) return null;
  const next = (from) => text.indexOf(marks, from);
  for (let end = next(begin + 1); end >= 0 && end - at < REACH; end = next(end + 1)) {
    const [before, after] = [text[end - 1], text[end + marks.length]];
    if (before === "\\" || /\s/.test(before) || before === marks[0] || after === marks[0]) continue;
    if (marks[0] === "_" && after && word.test(after)) continue;
    const inner = inline(text.slice(begin, end), depth + 1);
    const tags = { 1: ["em"], 2: [marks[0] === "~" ? "s" : "strong"], 3: ["em", "strong"] }[marks.length];
    const nodes = tags.reduceRight((within, tag) => [el(tag, {}, ...within)], inner);
    return { nodes, end: end + marks.length };
  }
  return null;
}

function constructAt(text, at, depth, inLink) {
  const c = text[at];
  if (c === "`") return codeSpan(text, at);
  if (c === "\\" && text[at + 1] && ESCAPED.test(text[at + 1])) return { nodes: [text[at + 1]], end: at + 2 };
  if (depth < DEPTH && (c === "*" || c === "_" || c === "~")) return emphasis(text, at, depth);
  if (inLink) return null;
  if (c === "[" || (c === "!" && text[at + 1] === "[")) return bracketed(text, at, depth);
  if (c === "h" || c === "H") return bareUrl(text, at);
  return null;
}

/** Returns the DOM nodes and strings of one paragraph's text. */
export function inline(text, depth = 0, inLink = false) {
  const nodes = [];
  let plain = "";
  for (let at = 0; at < text.length;) {
    const found = constructAt(text, at, depth, inLink);
    if (found) {
      if (plain) nodes.push(plain);
      plain = "";
      nodes.push(...found.nodes);
      at = found.end;
    } else {
      plain += text[at++];
    }
  }
  if (plain) nodes.push(plain);
  return nodes;
}
