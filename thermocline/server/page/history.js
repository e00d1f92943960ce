// Conversations in this browser's storage: one key each, so that two tabs do not overwrite each other's.

const PREFIX = "thermocline.conversation.";
const FORMAT = "thermocline-conversations";
const ROLES = ["user", "assistant", "tool"];
const memory = new Map(); // used if the browser has no storage, or it is full

function storage() {
  try { return window.localStorage; } catch { return null; }
}

function newId() {
  const random = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(random, (b) => b.toString(16).padStart(2, "0")).join("");
}

/** `tools`: functions that the model may call, as the API takes them. */
export function create() {
  const now = Date.now();
  return { id: newId(), title: "", system: "", tools: [], created: now, updated: now, messages: [] };
}

export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = conversation.messages.find((m) => m.role === "user" && (m.content.trim() || m.files?.length));
  if (!first) return "New conversation";
  const line = first.content.trim().split("\n", 1)[0] || first.files[0].name;
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

/** Returns false if it could be kept in this page's memory only. */
export function save(conversation) {
  memory.set(conversation.id, conversation);
  try {
    storage().setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return true;
  } catch {
    return false;
  }
}

export function remove(id) {
  memory.delete(id);
  try { storage().removeItem(PREFIX + id); } catch { /* it was never there */ }
}

export function load(id) {
  try {
    const kept = checked(JSON.parse(storage().getItem(PREFIX + id)), id);
    if (kept) return kept;
  } catch { /* none, or not ours */ }
  return memory.get(id) ?? null;
}

/** Calls `changed(id)` when another tab has saved or deleted a conversation. */
export function watch(changed) {
  window.addEventListener("storage", ({ key, newValue }) => {
    if (!key?.startsWith(PREFIX)) return;
    const id = key.slice(PREFIX.length);
    if (newValue === null) memory.delete(id);
    changed(id);
  });
}

/** Returns all conversations, the latest first. */
export function all() {
  const ids = new Set(memory.keys());
  try {
    for (const key of Object.keys(storage())) if (key.startsWith(PREFIX)) ids.add(key.slice(PREFIX.length));
  } catch { /* none */ }
  return [...ids].map(load).filter(Boolean).sort((a, b) => b.updated - a.updated);
}

export function exported(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

/** Keeps the conversations of an exported text as new ones. Returns how many, at least one, or throws. */
export function imported(text) {
  let given;
  try { given = JSON.parse(text); } catch { throw new Error("it is not JSON"); }
  if (given?.format !== FORMAT || !Array.isArray(given.conversations)) {
    throw new Error("it was not exported by this page");
  }
  const found = given.conversations.map((c) => checked(c, c?.id)).filter(Boolean);
  if (!found.length) throw new Error("there is no conversation in it");
  if (!found.map((c) => save({ ...c, id: newId() })).every(Boolean)) {
    throw new Error("this browser's storage is full; those that did not fit stay until this tab is closed");
  }
  return found.length;
}

/** Checks a stored conversation: another version may have written it, or it may be incomplete. */
function checked(c, id) {
  const good = (m) => ROLES.includes(m?.role) && typeof m.content === "string";
  if (!c || typeof id !== "string" || c.id !== id) return null;
  if (!Array.isArray(c.messages) || !c.messages.every(good)) return null;
  const times = Object.fromEntries(["created", "updated"].map((k) => [k, Number.isFinite(c[k]) ? c[k] : 0]));
  const texts = { title: text(c.title), system: text(c.system) };
  const tools = list(c.tools).filter((t) => typeof t?.function?.name === "string");
  return { id, ...times, ...texts, tools, messages: c.messages.map(checkedMessage) };
}

const text = (x) => (typeof x === "string" ? x : "");
const list = (x) => (Array.isArray(x) ? x : []);
const hasTexts = (keys) => (x) => x !== null && keys.every((key) => typeof x?.[key] === "string");
const only = (x, ...keys) => Object.fromEntries(keys.map((key) => [key, x[key]]));

function checkedMessage(m) {
  const { role, content, timings } = m;
  const numbers = Object.entries(timings ?? {}).filter(([, value]) => Number.isFinite(value));
  const known = ["thought", "finish", "model", "call"].filter((key) => typeof m[key] === "string");
  const calls = list(m.calls).filter(hasTexts(["id", "name", "arguments"]));
  const files = list(m.files).filter(hasTexts(["name", "text"]));
  return {
    role,
    content,
    ...Object.fromEntries(known.map((key) => [key, m[key]])),
    ...(Number.isFinite(m.thought_ms) ? { thought_ms: m.thought_ms } : {}),
    ...(calls.length ? { calls: calls.map((c) => only(c, "id", "name", "arguments")) } : {}),
    ...(files.length ? { files: files.map((f) => only(f, "name", "text")) } : {}),
    ...(timings ? { timings: Object.fromEntries(numbers) } : {}),
  };
}

/** Remembers small things: settings, the open conversation. */
export function remembered(name, otherwise) {
  try {
    return JSON.parse(storage().getItem(`thermocline.${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function remember(name, value) {
  try { storage().setItem(`thermocline.${name}`, JSON.stringify(value)); } catch { /* this time only */ }
}
