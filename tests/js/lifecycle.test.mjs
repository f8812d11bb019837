// The life of a sandbox through the SDK.

import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { test } from "node:test";
import { inspect } from "node:util";
import { AuthenticationError, Sandbox, SandboxError, SandboxNotFoundError } from "e2b";
import { failure, fresh, run, until } from "./support.mjs";

const WRONG_KEY = `e2b_${"0".repeat(40)}`;

const lifeOf = ({ startedAt, endAt }) => (endAt - startedAt) / 1000;
const secondsLeft = async (sandbox) => ((await sandbox.getInfo()).endAt - Date.now()) / 1000;

function assertBetween(low, value, high) {
  assert.ok(low <= value && value <= high, `${value} is not between ${low} and ${high}`);
}

async function idsOf(options) {
  const paginator = Sandbox.list(options);
  const pages = [];
  while (paginator.hasNext) pages.push((await paginator.nextItems()).map((info) => info.sandboxId));
  return pages;
}

test("created sandbox answers at once", async (story) => {
  const sandbox = await fresh(story, { timeoutMs: 60_000 });
  assert.match(sandbox.sandboxId, /^[a-z0-9]{20}$/);
  assert.equal(await sandbox.isRunning(), true);
  const info = await sandbox.getInfo();
  assert.deepEqual([info.sandboxId, info.state, info.envdVersion], [sandbox.sandboxId, "running", "0.6.13"]);
  assert.ok(info.name === "base" || info.templateId === "base");
  assert.ok(info.cpuCount >= 1 && info.memoryMB >= 128);
  assertBetween(50, lifeOf(info), 70);
});

test("default timeout is five minutes", async (story) => {
  const sandbox = await Sandbox.create();
  story.after(() => sandbox.kill());
  assertBetween(295, lifeOf(await sandbox.getInfo()), 305);
});

test("kill is final and says whether there was something", async () => {
  const sandbox = await Sandbox.create({ timeoutMs: 60_000 });
  assert.equal(await sandbox.kill(), true);
  assert.equal(await sandbox.isRunning(), false);
  // While it is being ended, a second kill joins the first.
  await until(async () => (await sandbox.kill()) === false, "no sandbox to kill");
  await failure(SandboxNotFoundError, sandbox.getInfo());
  await failure(SandboxNotFoundError, Sandbox.connect(sandbox.sandboxId));
  await failure(SandboxNotFoundError, sandbox.commands.run("true"));
  assert.equal(await Sandbox.kill("0".repeat(20)), false);
});

test("a command that runs when the sandbox is killed says so", async (story) => {
  const sandbox = await fresh(story);
  const handle = await sandbox.commands.run("sleep 60", { background: true });
  const ended = failure(Error, handle.wait());
  assert.equal(await sandbox.kill(), true);
  assert.match((await ended).message, /killed or reached its end of life/);
});

test("a download is not complete when the sandbox is killed", async (story) => {
  const sandbox = await fresh(story);
  await run(sandbox, "truncate -s 1G /tmp/endless");
  const parts = (await sandbox.files.read("/tmp/endless", { format: "stream" })).getReader();
  assert.ok((await parts.read()).value.length > 0);
  assert.equal(await sandbox.kill(), true);
  const toEnd = async () => {
    while (!(await parts.read()).done);
  };
  await failure(Error, toEnd());
});

test("timeout fires on time", async () => {
  const sandbox = await Sandbox.create({ timeoutMs: 4_000 });
  const { endAt } = await sandbox.getInfo();
  await until(async () => !(await sandbox.isRunning()), "the end of the sandbox", 8_000);
  assert.ok(Date.now() >= endAt, "it ended too early");
  await failure(SandboxNotFoundError, sandbox.getInfo());
});

test("set timeout counts from now and may shorten", async (story) => {
  const sandbox = await fresh(story);
  await sandbox.setTimeout(1_000_000);
  assertBetween(990, await secondsLeft(sandbox), 1000);
  await sandbox.setTimeout(100_000);
  assertBetween(90, await secondsLeft(sandbox), 100);
  await sandbox.setTimeout(0);
  await until(async () => !(await sandbox.isRunning()), "the end of the sandbox", 3_000);
  await failure(SandboxNotFoundError, sandbox.setTimeout(10_000));
});

test("connect reaches the same computer and never shortens", async (story) => {
  const sandbox = await fresh(story);
  await sandbox.files.write("/tmp/mark", "here");
  const before = (await sandbox.getInfo()).endAt;
  const other = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 10_000 });
  assert.equal(other.sandboxId, sandbox.sandboxId);
  assert.equal(await other.files.read("/tmp/mark"), "here");
  assert.deepEqual((await other.getInfo()).endAt, before);
  await sandbox.connect({ timeoutMs: 2_000_000 });
  assertBetween(1990, await secondsLeft(sandbox), 2000);
});

test("sdk sees the refusals", async () => {
  assert.equal((await failure(SandboxError, Sandbox.create("no-such-template"))).statusCode, 404);
  assert.equal((await failure(SandboxError, Sandbox.create({ timeoutMs: 0 }))).statusCode, 400);
});

test("sdk with a wrong key", async () => {
  await failure(AuthenticationError, Sandbox.create({ apiKey: WRONG_KEY }));
  await failure(AuthenticationError, Sandbox.list({ apiKey: WRONG_KEY }).nextItems());
  await failure(AuthenticationError, Sandbox.kill("0".repeat(20), { apiKey: WRONG_KEY }));
});

test("metadata is kept and filters", async (story) => {
  const tag = randomUUID();
  const awkward = { tag, "a b": "c=d&e", ü: "100%", plus: "1+1" };
  const one = await fresh(story, { metadata: awkward });
  const two = await fresh(story, { metadata: { tag, n: "2" } });
  assert.deepEqual((await one.getInfo()).metadata, awkward);
  const found = async (metadata) => (await idsOf({ query: { metadata: { tag, ...metadata } } })).flat().sort();
  assert.deepEqual(await found({}), [one.sandboxId, two.sandboxId].sort());
  assert.deepEqual(await found({ n: "2" }), [two.sandboxId]);
  assert.deepEqual(await found({ plus: "1+1", ü: "100%" }), [one.sandboxId]);
  assert.deepEqual(await found({ "a b": "c=d&e" }), [one.sandboxId]);
  assert.deepEqual(await found({ n: "3" }), []);
});

test("listing pages in order and filters", async (story) => {
  const metadata = { tag: randomUUID() };
  const boxes = [];
  for (let n = 0; n < 3; n++) boxes.push(await fresh(story, { metadata }));
  const ids = boxes.map((sandbox) => sandbox.sandboxId);
  const query = { metadata };
  assert.deepEqual(await idsOf({ query, limit: 1 }), ids.toReversed().map((id) => [id]));
  assert.deepEqual(await idsOf({ query, limit: 2, order: "asc" }), [ids.slice(0, 2), ids.slice(2)]);

  // A page token holds while sandboxes come and go.
  const paginator = Sandbox.list({ query, limit: 1 });
  const next = async () => (await paginator.nextItems()).map((info) => info.sandboxId);
  assert.deepEqual(await next(), [ids[2]]);
  await boxes[2].kill();
  assert.deepEqual(await next(), [ids[1]]);
  assert.deepEqual(await next(), [ids[0]]);
  assert.deepEqual([paginator.hasNext, paginator.nextToken], [false, undefined]);

  const { startedAt } = await boxes[1].getInfo();
  assert.deepEqual(await idsOf({ query: { metadata, startedAfter: startedAt } }), [[ids[1]]]);
  assert.equal((await idsOf({ query: { metadata, template: "base" } })).flat().length, 2);
  assert.deepEqual(await idsOf({ query: { metadata, template: "no-such-template" } }), [[]]);
  assert.deepEqual(await idsOf({ query: { metadata, state: ["paused"] } }), [[]]);
  assert.equal((await idsOf({ query: { metadata, state: ["running", "paused"] } })).flat().length, 2);
});

test("environment and secrets of creation", async (story) => {
  const sandbox = await fresh(story, { envs: { COLOUR: "blue", QUOTED: "a 'b' \"c\" $d" } });
  assert.equal(await run(sandbox, 'printf "%s|%s" "$COLOUR" "$QUOTED"'), "blue|a 'b' \"c\" $d");
  assert.equal(await run(sandbox, "echo $COLOUR", { envs: { COLOUR: "red" } }), "red\n");
  const env = await run(sandbox, "env");
  assert.match(env, /^E2B_SANDBOX=true$/m);
  assert.match(env, new RegExp(`^E2B_SANDBOX_ID=${sandbox.sandboxId}$`, "m"));
  assert.doesNotMatch(env, /e2b_[0-9a-f]{40}/);
});

test("a paused computer goes on where it was", async (story) => {
  const sandbox = await fresh(story);
  await run(sandbox, "echo kept > /dev/shm/memory; echo kept > disk");
  assert.equal(await sandbox.pause(), true);
  assert.equal(await sandbox.isRunning(), false);
  assert.equal((await sandbox.getInfo()).state, "paused");
  assert.equal(await sandbox.pause(), false);
  const again = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 60_000 });
  assert.equal(again.sandboxId, sandbox.sandboxId);
  assert.equal(await run(again, "cat /dev/shm/memory disk"), "kept\nkept\n");
  assert.equal(await run(sandbox, "echo the old object as well"), "the old object as well\n");
});

test("ten computers at once", async () => {
  const one = async (number) => {
    const sandbox = await Sandbox.create({ timeoutMs: 120_000 });
    try {
      return await run(sandbox, `echo ${number}`);
    } finally {
      await sandbox.kill();
    }
  };
  const numbers = Array.from({ length: 10 }, (_, number) => number);
  assert.deepEqual(await Promise.all(numbers.map(one)), numbers.map((number) => `${number}\n`));
});

test("a snapshot and a fork go on from where their source was", async (story) => {
  const sandbox = await fresh(story, { timeoutMs: 120_000 });
  await sandbox.files.write("/dev/shm/state", "here");
  const snapshot = await sandbox.createSnapshot();
  story.after(() => Sandbox.deleteSnapshot(snapshot.snapshotId));
  const listed = await sandbox.listSnapshots().nextItems();
  assert.deepEqual(listed.map((one) => one.snapshotId), [snapshot.snapshotId]);
  const child = await Sandbox.create(snapshot.snapshotId, { timeoutMs: 60_000 });
  story.after(() => child.kill());
  const [fork] = await sandbox.fork({ timeoutMs: 60_000 });
  assert.ok(fork instanceof Sandbox, `${fork}`);
  story.after(() => fork.kill());
  assert.equal(new Set([sandbox, child, fork].map((one) => one.sandboxId)).size, 3);
  for (const one of [sandbox, child, fork]) {
    assert.equal(await one.files.read("/dev/shm/state"), "here");
  }
  await child.files.write("/dev/shm/state", "elsewhere");
  assert.equal(await sandbox.files.read("/dev/shm/state"), "here");
});

test("what a sandbox uses is told every few seconds", async (story) => {
  const sandbox = await fresh(story, { timeoutMs: 120_000 });
  assert.deepEqual(await sandbox.getMetrics({ end: new Date(Date.now() - 3_600_000) }), []);
  const [first] = await until(async () => {
    const samples = await sandbox.getMetrics();
    return samples.length > 0 && samples;
  }, "the first sample", 30_000);
  assert.ok(first.memUsed > 0 && first.memUsed <= first.memTotal, inspect(first));
  assert.ok(first.diskUsed > 0 && first.diskUsed <= first.diskTotal, inspect(first));
  assert.ok(first.cpuCount > 0 && first.cpuUsedPct >= 0 && first.cpuUsedPct <= 100, inspect(first));
});
