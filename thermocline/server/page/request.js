// A conversation as a request to the server, and the results that its calls have.

import { composed } from "./attachments.js";
import { reasoning, sampling } from "./settings.js";

/** Returns the results of a message's calls by their ids: of the messages that follow it. */
export function resultsOf(messages, index) {
  const found = new Map();
  for (const m of messages.slice(index + 1)) {
    if (m.role !== "tool") break;
    found.set(m.call, m.content);
  }
  return found;
}

function sent(m) {
  if (m.role === "tool") return { role: "tool", tool_call_id: m.call, content: m.content };
  if (m.role === "user") return { role: "user", content: composed(m) };
  if (!m.calls) return { role: "assistant", content: m.content };
  const calls = m.calls.map(({ id, name, arguments: given }) =>
    ({ id, type: "function", function: { name, arguments: given } }));
  // The thought that led to a call is a part of the turn that goes on.
  const thought = m.thought ? { reasoning_content: m.thought } : {};
  return { role: "assistant", content: m.content, ...thought, tool_calls: calls };
}

/** Returns the path and the body that ask for the next message. `model`: its name. */
export function request(conversation, messages, { chats, model }) {
  if (!chats) {
    const prompt = messages.map((m) => m.content).join("");
    return ["/v1/completions", { model, prompt, ...sampling() }];
  }
  const system = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  const tools = conversation.tools?.length ? { tools: conversation.tools } : {};
  const said = [...system, ...messages.map(sent)];
  return ["/v1/chat/completions", { model, messages: said, ...tools, ...sampling(), ...reasoning() }];
}
