// What the unmodified openai package for Node does at a front door. Usage: node stock_client.mjs MODEL URL KEY
// Certificates come from NODE_EXTRA_CA_CERTS.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [model, baseURL, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${baseURL}/v1`, apiKey, maxRetries: 0, timeout: 60_000 });
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Bern", "Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", description: "The weather of a city.", parameters } }];

const models = await client.models.list();
assert.ok(models.data.some((one) => one.id === model));

const messages = [{ role: "user", content: "Name a river." }];
const first = await client.chat.completions.create({ model, messages, max_tokens: 16, temperature: 0 });
assert.ok(first.choices[0].message.content);
const stream = await client.chat.completions.create({
  model, messages, max_tokens: 16, temperature: 0, stream: true, stream_options: { include_usage: true },
});
let text = "";
let usage = null;
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, first.choices[0].message.content);
assert.equal(usage.completion_tokens, first.usage.completion_tokens);

messages.push(first.choices[0].message, { role: "user", content: "Another one." });
const second = await client.chat.completions.create({ model, messages, max_tokens: 16, temperature: 0 });
assert.ok(second.choices[0].message.content);

const asked = [{ role: "user", content: "What is the weather in Bern?" }];
const runner = client.chat.completions.stream({ model, messages: asked, tools, tool_choice: "required", max_tokens: 64, temperature: 0 });
const called = await runner.finalChatCompletion();
const [call] = called.choices[0].message.tool_calls;
assert.equal(called.choices[0].finish_reason, "tool_calls");
assert.equal(call.function.name, "weather");
assert.ok(["Bern", "Oslo"].includes(JSON.parse(call.function.arguments).city));
asked.push(called.choices[0].message, { role: "tool", tool_call_id: call.id, content: "sunny" });
const told = await client.chat.completions.create({ model, messages: asked, tools, max_tokens: 16, temperature: 0 });
assert.equal(told.choices.length, 1);

const vectors = await client.embeddings.create({ model, input: ["a river", "a mountain"] });
assert.equal(vectors.data.length, 2);
assert.ok(vectors.data[0].embedding.length > 64);

await assert.rejects(
  client.chat.completions.create({ model: "no-such-model", messages }),
  (err) => err instanceof OpenAI.NotFoundError && err.code === "model_not_found",
);
console.log(JSON.stringify({ client: "openai-node" }));
