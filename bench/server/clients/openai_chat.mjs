// OpenAI's client for JavaScript: node bench/server/clients/openai_chat.mjs URL
// (npm install openai in a folder of its own, and a copy of this file there)
import assert from "node:assert";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "any", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const asked = {
  model, temperature: 0, max_tokens: 20,
  messages: [{ role: "user", content: "Once upon a time, there was a" }],
};
const whole = await client.chat.completions.create(asked);
const text = whole.choices[0].message.content;
assert(text && whole.usage.completion_tokens === 20 && whole.choices[0].finish_reason === "length");
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(streamed, text);
await assert.rejects(
  client.chat.completions.create({ ...asked, model: "another" }),
  (e) => e instanceof OpenAI.NotFoundError && e.code === "model_not_found",
);
const stream = await client.chat.completions.create({ ...asked, max_tokens: 400, stream: true });
for await (const _ of stream) break; // leaves in the midst of it
console.log("openai for JavaScript: whole, streamed, error: well");
