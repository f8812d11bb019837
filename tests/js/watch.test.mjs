// Watching folders through the SDK, which gets events as a stream.

import assert from "node:assert/strict";
import { test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { FileNotFoundError, FilesystemEventType, FileType, InvalidArgumentError, RateLimitError } from "e2b";
import { failure, fresh, run, shared, until } from "./support.mjs";

const { CHMOD, CREATE, REMOVE, RENAME, WRITE } = FilesystemEventType;
const box = shared();

/** Watches, and collects what is told and how it ends. */
async function watch(files, path, options = {}) {
  const seen = { events: [], exits: [] };
  const onExit = (error) => void seen.exits.push(error);
  const onEvent = (event) => void seen.events.push(event);
  seen.handle = await files.watchDir(path, onEvent, { timeoutMs: 0, onExit, ...options });
  seen.told = () => seen.events.map(({ name, type }) => [name, type]);
  /** What was told so far, once it is so much, and is forgotten. */
  seen.next = async (count) => {
    await until(() => seen.events.length >= count, `${count} events`).catch((error) => {
      assert.fail(`${error.message}: ${JSON.stringify(seen.told())}`);
    });
    const told = seen.told();
    seen.events = [];
    return told;
  };
  return seen;
}

async function folder(story) {
  const path = `/home/user/${story.name.replaceAll(" ", "_")}`;
  await box.sandbox.files.makeDir(path);
  return path;
}

test("a new file is three events", async (story) => {
  const { files } = box.sandbox;
  const path = await folder(story);
  const seen = await watch(files, path);
  await files.write(`${path}/new.txt`, "content");
  assert.deepEqual(await seen.next(3), [["new.txt", CREATE], ["new.txt", CHMOD], ["new.txt", WRITE]]);
  await files.rename(`${path}/new.txt`, `${path}/renamed`);
  await files.remove(`${path}/renamed`);
  assert.deepEqual(await seen.next(3), [["new.txt", RENAME], ["renamed", CREATE], ["renamed", REMOVE]]);
  await seen.handle.stop();
  await files.write(`${path}/late`, "1");
  await sleep(100);
  assert.deepEqual(seen.told(), []);
});

test("commands are seen", async (story) => {
  const path = await folder(story);
  const seen = await watch(box.sandbox.files, path);
  const name = "$'a\\xffb'";
  await run(box.sandbox, `cd ${path}; mkdir d; echo 1 > d/below; true > ${name}; chmod 600 ${name}; ln -s / link`);
  assert.deepEqual(await seen.next(4), [["d", CREATE], ["a\ufffdb", CREATE], ["a\ufffdb", CHMOD], ["link", CREATE]]);
  await seen.handle.stop();
});

test("folders below", async (story) => {
  const { files } = box.sandbox;
  const path = await folder(story);
  await files.makeDir(`${path}/old`);
  const seen = await watch(files, path, { recursive: true });
  await files.write(`${path}/old/f`, "1");
  assert.deepEqual(await seen.next(3), [["old/f", CREATE], ["old/f", CHMOD], ["old/f", WRITE]]);
  await run(box.sandbox, `mkdir -p ${path}/new/deep && true > ${path}/new/deep/f`);
  assert.deepEqual(await seen.next(3), [["new", CREATE], ["new/deep", CREATE], ["new/deep/f", CREATE]]);
  await run(box.sandbox, `mv ${path}/new ${path}/moved; echo 2 >> ${path}/moved/deep/f`);
  assert.deepEqual(await seen.next(3), [["new", RENAME], ["moved", CREATE], ["moved/deep/f", WRITE]]);
  await files.remove(`${path}/moved`);
  assert.deepEqual(await seen.next(3), [["moved/deep/f", REMOVE], ["moved/deep", REMOVE], ["moved", REMOVE]]);
  await seen.handle.stop();
});

test("entries", async (story) => {
  const { files } = box.sandbox;
  const path = await folder(story);
  const seen = await watch(files, path, { recursive: true, includeEntry: true });
  await files.makeDir(`${path}/sub`);
  await until(() => seen.events.length > 0, "an event");
  const [{ name, entry }] = seen.events;
  assert.deepEqual([name, entry.path, entry.type], ["sub", `${path}/sub`, FileType.DIR]);
  await files.remove(`${path}/sub`);
  await until(() => seen.events.at(-1).type === REMOVE, "the removal");
  assert.equal(seen.events.at(-1).entry, undefined);
  await seen.handle.stop();
});

test("the folder itself", async (story) => {
  const { files } = box.sandbox;
  const path = await folder(story);
  const seen = await watch(files, path);
  await files.remove(path);
  await until(() => seen.exits.length > 0, "the end of the stream");
  assert.deepEqual([seen.told(), seen.exits], [[[".", REMOVE]], [undefined]]);
});

test("what cannot be watched", async (story) => {
  const { files } = box.sandbox;
  const path = await folder(story);
  const nothing = () => {};
  await failure(FileNotFoundError, files.watchDir(`${path}/none`, nothing));
  await files.write(`${path}/file`, "");
  await failure(InvalidArgumentError, files.watchDir(`${path}/file`, nothing));
});

test("too many watchers are refused", async (story) => {
  const { files } = await fresh(story);
  const handles = [];
  const error = await failure(
    RateLimitError,
    (async () => {
      for (let n = 0; n < 1000; n++) handles.push(await files.watchDir("/home/user", () => {}, { timeoutMs: 0 }));
    })(),
  );
  assert.match(error.message, /watchers in this sandbox already/);
  assert.equal(handles.length, 128);
  // A stream that ends makes room.
  await handles.pop().stop();
  const again = await until(() => files.watchDir("/home/user", () => {}, { timeoutMs: 0 }).catch(() => null), "room");
  await Promise.all([...handles, again].map((handle) => handle.stop()));
});

test("thirty thousand files are seen", async (story) => {
  const sandbox = await fresh(story);
  const created = [];
  const exits = [];
  const onEvent = ({ name, type }) => void (type === CREATE && created.push(name));
  const onExit = (error) => void exits.push(error);
  await sandbox.files.watchDir("/dev/shm", onEvent, { timeoutMs: 0, recursive: true, onExit });
  const script = `
import os
for d in range(30):
    os.mkdir(f"/dev/shm/{d}")
    for n in range(1000):
        os.close(os.open(f"/dev/shm/{d}/{n}", os.O_CREAT | os.O_WRONLY))
`;
  await run(sandbox, `python3 -c '${script}'`);
  await until(() => created.length >= 30_030 || exits.length > 0, "all events", 30_000);
  assert.deepEqual([exits, created.length, new Set(created).size], [[], 30_030, 30_030]);
});
