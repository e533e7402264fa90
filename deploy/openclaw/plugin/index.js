// The command /rate: tells Clawloop what a person thinks of the last reply of the conversation, without asking the model.
// Address and key are those of the provider `clawloop` in OpenClaw's own configuration.

const USAGE = "Say /rate up, /rate down, or /rate and what should have been different.";
// The gateway stores the feedback before it answers: half a second, or a few on a busy machine.
const SECONDS = 30;

export async function rate(ctx) {
  const said = (ctx.args ?? "").trim();
  if (!said) return { text: USAGE };
  const provider = ctx.config?.models?.providers?.clawloop;
  if (!provider?.baseUrl) return { text: "No provider `clawloop` is configured.", isError: true };
  const verdict = said.toLowerCase();
  const feedback = verdict === "up" || verdict === "down" ? { rating: verdict } : { text: said };
  if (ctx.sessionId) feedback.session_id = ctx.sessionId;
  let answer;
  try {
    answer = await fetch(`${provider.baseUrl}/feedback`, {
      method: "POST",
      headers: { Authorization: `Bearer ${provider.apiKey}`, "Content-Type": "application/json" },
      body: JSON.stringify({ turn: "last", ...feedback }),
      signal: AbortSignal.timeout(SECONDS * 1000),
    });
  } catch (error) {
    return { text: `Clawloop does not answer: ${error.message}`, isError: true };
  }
  const body = await answer.json().catch(() => ({}));
  if (answer.ok) return { text: body.message };
  return { text: body.error?.message ?? `Clawloop answered ${answer.status}.`, isError: true };
}

export default {
  id: "clawloop",
  name: "Clawloop",
  description: "Feedback on the last reply",
  register(api) {
    api.registerCommand({
      name: "rate",
      description: "Rate the last reply: up, down, or what should have been different",
      acceptsArgs: true,
      handler: rate,
    });
  },
};
