// Conversations in this browser's storage: one key each, so that two tabs do not overwrite each other's.

const PREFIX = "thermocline.conversation.";
const memory = new Map(); // used if the browser has no storage, or it is full

function storage() {
  try { return window.localStorage; } catch { return null; }
}

export function create() {
  const now = Date.now();
  const id = Array.from(crypto.getRandomValues(new Uint8Array(12)), (b) => b.toString(16).padStart(2, "0"));
  return { id: id.join(""), title: "", system: "", created: now, updated: now, messages: [] };
}

export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = conversation.messages.find((m) => m.role === "user" && m.content.trim());
  if (!first) return "New conversation";
  const line = first.content.trim().split("\n", 1)[0];
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

/** Checks a stored conversation: another version may have written it, or it may be incomplete. */
function checked(c, id) {
  const good = (m) => ["user", "assistant"].includes(m?.role) && typeof m.content === "string";
  if (!c || c.id !== id || !Array.isArray(c.messages) || !c.messages.every(good)) return null;
  const times = Object.fromEntries(["created", "updated"].map((k) => [k, Number.isFinite(c[k]) ? c[k] : 0]));
  const texts = { title: String(c.title ?? ""), system: String(c.system ?? "") };
  return { id, ...times, ...texts, messages: c.messages.map(checkedMessage) };
}

function checkedMessage({ role, content, thought, finish, timings }) {
  const numbers = Object.entries(timings ?? {}).filter(([, value]) => Number.isFinite(value));
  return {
    role,
    content,
    ...(typeof thought === "string" ? { thought } : {}),
    ...(typeof finish === "string" ? { finish } : {}),
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
