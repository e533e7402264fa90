// One tab of headless Chromium in the sandbox: shows the model what is on the page, and does what the model calls for.
//
// Reads one call a line and answers each with one line, for harness.py. It is also the site that the tab sees: pages
// come from browser.json, and what the tab posts is written to /work/state.json, for the verifier. Nothing else can be
// reached from a page, and no call reaches the script of one. Knows nothing of what the task wants.
"use strict";
const fs = require("node:fs");
const readline = require("node:readline");
const config = JSON.parse(fs.readFileSync("/task/browser.json", "utf8"));
const { chromium } = require(`${config.playwright}/package`);

const SITE = "http://site.test";
// A busy machine draws a page in seconds; a call that waits for what never comes must leave time for others.
const PATIENCE = 10_000;
const LONGEST_TEXT = 6_000;
const MOST_SENT = 100;
const sent = [];

async function answer(route) {
  const request = route.request();
  const url = new URL(request.url());
  if (url.origin !== SITE) return route.abort();
  const html = (body) => route.fulfill({ contentType: "text/html; charset=utf-8", body });
  if (request.method() === "POST") {
    const fields = [...new URLSearchParams(request.postData() ?? "")];
    if (sent.length < MOST_SENT) sent.push({ path: url.pathname, fields });
    return html(config.sent);
  }
  return url.pathname in config.pages ? html(config.pages[url.pathname]) : route.fulfill({ status: 404, body: "" });
}

/** The element of the newest snapshot with this reference. */
function element(page, { ref }) {
  if (typeof ref !== "string" || !/^(f\d+)?e\d+$/.test(ref)) throw new Error("`ref` must be a reference of the page, such as e5");
  return page.locator(`aria-ref=${ref}`);
}

const calls = {
  click: (page, given) => element(page, given).click(),
  type: async (page, given) => {
    await element(page, given).fill(String(given.text ?? ""));
    if (given.enter) await element(page, given).press("Enter");
  },
  select: (page, given) => element(page, given).selectOption({ label: String(given.option ?? "") }),
  scroll: (page, given) => {
    const part = given.direction === "up" ? -0.8 : 0.8;
    const scroll = (node, share) => node.scrollBy(0, share * node.clientHeight);
    return element(page, given).evaluate(scroll, part);
  },
};

/** Wait until what a call began is done: navigations, and what handlers changed. */
async function settle(page) {
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  for (let before = null; before !== page.url(); ) {
    before = page.url();
    await page.waitForLoadState("load");
    // A page that goes away meanwhile is looked at again.
    await page.evaluate(frame).catch(() => (before = null));
  }
}

async function shown(page, text) {
  await settle(page);
  const at = new URL(page.url()).pathname;
  fs.writeFileSync("/work/state.json", JSON.stringify({ sent, at }));
  const snapshot = await page.ariaSnapshot({ mode: "ai" });
  const said = { text: `${text}\n${snapshot}`.trim().slice(0, LONGEST_TEXT) };
  if (config.pictures) said.picture = (await page.screenshot({ type: "png" })).toString("base64");
  return said;
}

async function act(page, { name, arguments: given }) {
  if (name === "done") return { text: "", ended: true };
  if (!Object.hasOwn(calls, name)) return shown(page, `error: there is no tool ${JSON.stringify(name)}`);
  try {
    await calls[name](page, given);
    return await shown(page, "");
  } catch (error) {
    return shown(page, `error: ${error.message.split("\n")[0]}`);
  }
}

async function main() {
  const browser = await chromium.launch({
    executablePath: config.program,
    args: config.options,
    env: { ...process.env, ...config.variables },
    proxy: { server: "http://127.0.0.1:9", bypass: "<-loopback>" }, // a page cannot ask for the gateway either
  });
  const context = await browser.newContext({
    acceptDownloads: false,
    locale: "en-US",
    serviceWorkers: "block",
    timezoneId: "UTC",
    viewport: { width: 800, height: 600 },
  });
  await context.route("**/*", answer);
  const page = await context.newPage();
  page.setDefaultTimeout(PATIENCE);
  page.setDefaultNavigationTimeout(6 * PATIENCE);
  await page.goto(`${SITE}/`);
  const say = (said) => process.stdout.write(`${JSON.stringify(said)}\n`);
  say(await shown(page, ""));
  for await (const line of readline.createInterface({ input: process.stdin })) say(await act(page, JSON.parse(line)));
  await browser.close();
}

main().catch((error) => {
  process.stderr.write(`the browser failed: ${error.message}\n`);
  process.exit(75);
});
