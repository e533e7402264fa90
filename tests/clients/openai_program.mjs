// What OpenAI's SDK for JavaScript gets from a gateway, as JSON. Arguments: the SDK's folder, address, key.
import { pathToFileURL } from "node:url";

const [folder, url, key] = process.argv.slice(2);
const { OpenAI } = await import(pathToFileURL(`${folder}/index.mjs`).href);

const client = (session) =>
  new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0, defaultHeaders: { "X-Session-Id": session } });
const tool = {
  type: "function",
  function: { name: "exec", parameters: { type: "object", properties: { command: { type: "string" } } } },
};
const asked = { role: "user", content: "use a TOOL" };
const chat = (session, messages, options = {}) =>
  client(session).chat.completions.create({ model: "policy", messages, ...options });
const calls = (message) =>
  (message.tool_calls ?? []).map((call) => [call.function.name, JSON.parse(call.function.arguments)]);

const hello = [{ role: "user", content: "hello" }];
const whole = await chat("whole", hello);
let streamed = "", chunks = 0;
for await (const chunk of await chat("stream", hello, { stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  chunks += 1;
}
const called = (await chat("tools", [asked], { tools: [tool] })).choices[0].message;
const result = { role: "tool", tool_call_id: called.tool_calls[0].id, content: "done" };
const answered = await chat("tools", [asked, called, result], { tools: [tool] });
const runner = client("tool stream").chat.completions.stream({ model: "policy", messages: [asked], tools: [tool] });
const joined = (await runner.finalChatCompletion()).choices[0].message;
const response = await client("responses").responses.create({ model: "policy", input: "hello" });
let response_streamed = "";
for await (const event of await client("responses stream").responses.create({
  model: "policy", input: "hello", stream: true,
})) if (event.type === "response.output_text.delta") response_streamed += event.delta;
let error = null;
try {
  await client("error").chat.completions.create({ model: "none", messages: hello });
} catch (failed) {
  error = [failed.constructor.name, failed.code];
}
const models = [];
for await (const model of client("models").models.list()) models.push(model.id);
console.log(JSON.stringify({
  whole: whole.choices[0].message.content,
  usage: whole.usage.completion_tokens,
  streamed,
  chunks,
  calls: calls(called),
  answered: answered.choices[0].message.content,
  "streamed calls": calls(joined),
  responses: response.output_text,
  "responses streamed": response_streamed,
  models,
  error,
}));
