// The official JavaScript clients against a server; a JSON object with what they read goes to stdout.
// node agent_clients.mjs URL, in a directory whose node_modules has openai and @anthropic-ai/sdk.
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const require = createRequire(join(process.cwd(), "any.js"));
const load = async (name) => (await import(pathToFileURL(require.resolve(name)))).default;
const OpenAI = await load("openai");
const Anthropic = await load("@anthropic-ai/sdk");
const url = process.argv[2];
const parameters = { type: "object", properties: { path: { type: "string" } }, required: ["path"] };

const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "any", maxRetries: 0 });
const asked = {
  model: "scripted",
  input: "Hello",
  tools: [{ type: "function", name: "read", parameters, strict: false }],
};
const kinds = [];
const responses = openai.responses.stream(asked);
for await (const event of responses) kinds.push(event.type);
const streamed = await responses.finalResponse();
const next = await openai.responses.create({
  ...asked,
  previous_response_id: streamed.id,
  input: [{ type: "function_call_output", call_id: streamed.output.at(-1).call_id, output: "x" }],
});

const anthropic = new Anthropic({ baseURL: url, apiKey: "any", maxRetries: 0 });
const talk = {
  model: "scripted",
  max_tokens: 50,
  messages: [{ role: "user", content: "Hello" }],
  tools: [{ name: "read", input_schema: parameters }],
};
const message = await anthropic.messages.stream(talk).finalMessage();
const { max_tokens, ...counted } = talk;
const count = await anthropic.messages.countTokens(counted);
const refused = await anthropic.messages.create({ ...talk, model: "claude" }).catch((error) => error);

console.log(
  JSON.stringify({
    kinds,
    items: streamed.output.map((item) => item.type),
    text: streamed.output_text,
    next: next.output_text,
    blocks: message.content,
    stop_reason: message.stop_reason,
    tokens: count.input_tokens,
    refused: [refused.constructor.name, refused.status, refused.error.error.type],
  }),
);
