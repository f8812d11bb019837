// Files through the SDK.

import assert from "node:assert/strict";
import { createHash, randomBytes } from "node:crypto";
import { test } from "node:test";
import { AuthenticationError, FileNotFoundError, FileType, InvalidArgumentError, NotEnoughSpaceError } from "e2b";
import { SERVER, failure, fresh, route, run, shared } from "./support.mjs";

const box = shared();

const sha256 = (data) => createHash("sha256").update(data).digest("hex");
const bufferOf = (bytes) => bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength);

async function together(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return Buffer.concat(parts);
}

test("text round trip", async () => {
  const { files } = box.sandbox;
  const { name, path, type } = await files.write("/home/user/a.txt", "Grüße\n");
  assert.deepEqual([name, path, type], ["a.txt", "/home/user/a.txt", FileType.FILE]);
  assert.equal(await files.read("/home/user/a.txt"), "Grüße\n");
  assert.equal(await run(box.sandbox, "cat a.txt; stat -c '%U %G %a' a.txt"), "Grüße\nuser user 644\n");
  await files.write("a.txt", "shorter");
  assert.equal(await files.read("a.txt"), "shorter");
});

test("bytes round trip", async () => {
  const { files } = box.sandbox;
  for (const data of [Buffer.alloc(0), Buffer.from("\0\xff\r\n".repeat(10), "latin1"), randomBytes(300_000)]) {
    for (const useOctetStream of [true, false]) {
      for (const given of [bufferOf(data), new Blob([data]), new Blob([data]).stream()]) {
        await files.write("/tmp/bytes", given, { useOctetStream });
        assert.ok(data.equals(await files.read("/tmp/bytes", { format: "bytes" })));
      }
      const blob = await files.read("/tmp/bytes", { format: "blob" });
      assert.ok(data.equals(Buffer.from(await blob.arrayBuffer())));
      assert.ok(data.equals(await together(await files.read("/tmp/bytes", { format: "stream" }))));
    }
  }
});

test("gzip both ways", async () => {
  const text = "abc".repeat(100_000);
  await box.sandbox.files.write("/tmp/zipped", text, { gzip: true });
  assert.equal(await run(box.sandbox, "wc -c < /tmp/zipped"), "300000\n");
  assert.equal(await box.sandbox.files.read("/tmp/zipped", { gzip: true }), text);
});

test("fifty mib round trip", async () => {
  const chunk = randomBytes(1 << 20);
  const digest = sha256(Buffer.concat(Array(50).fill(chunk)));
  let left = 50;
  const source = new ReadableStream({
    pull(controller) {
      if (left-- > 0) controller.enqueue(new Uint8Array(chunk));
      else controller.close();
    },
  });
  await box.sandbox.files.write("/tmp/big", source);
  assert.equal((await run(box.sandbox, "sha256sum /tmp/big")).split(" ")[0], digest);
  const back = createHash("sha256");
  for await (const part of await box.sandbox.files.read("/tmp/big", { format: "stream" })) back.update(part);
  assert.equal(back.digest("hex"), digest);
  await box.sandbox.files.remove("/tmp/big");
});

test("parents are made and belong to the user", async () => {
  await box.sandbox.files.write("/home/user/new/deep/file", "x");
  assert.equal(await run(box.sandbox, "stat -c %U new new/deep new/deep/file"), "user\nuser\nuser\n");
});

test("files belong to whom the client names", async () => {
  const { files } = box.sandbox;
  await files.write("/root/secret", "x", { user: "root" });
  assert.equal(await run(box.sandbox, "stat -c '%U %a' /root/secret", { user: "root" }), "root 644\n");
  await files.write("~/mine", "x", { user: "root" });
  assert.equal(await files.exists("/root/mine"), true);
  await failure(AuthenticationError, files.write("/tmp/x", "x", { user: "nobody-here" }));
  await failure(AuthenticationError, files.list("/tmp", { user: "nobody-here" }));
});

test("list info exists", async () => {
  const { files } = box.sandbox;
  await run(box.sandbox, "mkdir -p l/sub/subsub && echo hi > l/f && ln -s f l/link && touch l/sub/subsub/z");
  const entries = Object.fromEntries((await files.list("l")).map((entry) => [entry.name, entry]));
  assert.deepEqual(Object.keys(entries).sort(), ["f", "link", "sub"]);
  assert.deepEqual([entries.f.size, entries.f.type, entries.sub.type], [3, FileType.FILE, FileType.DIR]);
  const deep = (await files.list("/home/user/l", { depth: 3 })).map((entry) => entry.path);
  assert.ok(deep.includes("/home/user/l/sub/subsub") && deep.includes("/home/user/l/sub/subsub/z"));
  const { path, mode, permissions, owner, group, modifiedTime } = await files.getInfo("l/f");
  assert.deepEqual([path, mode, permissions, owner, group], ["/home/user/l/f", 0o644, "-rw-r--r--", "user", "user"]);
  assert.ok(Math.abs(modifiedTime.getTime() - Date.now()) < 600_000);
  assert.equal((await files.getInfo("l/link")).symlinkTarget, "/home/user/l/f");
  assert.deepEqual([await files.exists("l/f"), await files.exists("l/sub")], [true, true]);
  assert.equal(await files.exists("l/none"), false);
  await failure(FileNotFoundError, files.getInfo("/no/such/thing"));
  await failure(FileNotFoundError, files.list("/no/such/thing"));
  await failure(FileNotFoundError, files.read("/no/such/thing"));
  await failure(InvalidArgumentError, files.list("l/f"));
});

test("make dir rename remove", async () => {
  const { files } = box.sandbox;
  assert.equal(await files.makeDir("/home/user/d/e"), true);
  assert.equal(await files.makeDir("/home/user/d/e"), false);
  await files.write("d/e/f", "1");
  await failure(InvalidArgumentError, files.makeDir("/home/user/d/e/f"));
  assert.equal((await files.rename("d/e/f", "d/new/g")).path, "/home/user/d/new/g");
  assert.equal(await files.read("d/new/g"), "1");
  await failure(FileNotFoundError, files.rename("d/e/f", "d/x"));
  await files.remove("d");
  assert.equal(await files.exists("d"), false);
  await files.remove("d");
});

test("several files at once", async () => {
  const many = Array.from({ length: 20 }, (_, n) => ({ path: `many/${n}`, data: `${n}` }));
  const written = await box.sandbox.files.write(many);
  assert.deepEqual(written.map((entry) => entry.path), many.map(({ path }) => `/home/user/${path}`));
  assert.equal(await box.sandbox.files.read("many/19"), "19");
});

test("odd names", async () => {
  const names = ["with space", "ünïcödé", "-rf", "a'b\"c", "new\nline", "percent%20"];
  for (const name of names) {
    await box.sandbox.files.write(`/tmp/odd/${name}`, name);
    assert.equal(await box.sandbox.files.read(`/tmp/odd/${name}`), name);
  }
  assert.deepEqual((await box.sandbox.files.list("/tmp/odd")).map(({ name }) => name).sort(), names.sort());
});

test("directory is no file", async () => {
  await failure(InvalidArgumentError, box.sandbox.files.read("/tmp"));
  await failure(InvalidArgumentError, box.sandbox.files.write("/tmp", "x"));
});

test("links are followed but not into other processes", async () => {
  const { files } = box.sandbox;
  await files.write("target/file", "content");
  await run(box.sandbox, "ln -sfn target folderlink; ln -sf folderlink/file filelink; ln -sf loop loop");
  assert.equal(await files.read("folderlink/file"), "content");
  await files.write("filelink", "changed");
  assert.equal(await files.read("target/file"), "changed");
  for (const path of ["loop", "/proc/1/root/etc/passwd", "/proc/self/fd/0", "/proc/1/exe", "/proc/1/cwd/etc/passwd"]) {
    await failure(Error, files.read(path));
  }
});

test("what is no regular file is refused", async () => {
  await run(box.sandbox, "mkfifo /tmp/pipe");
  for (const path of ["/tmp/pipe", "/dev/zero"]) await failure(InvalidArgumentError, box.sandbox.files.read(path));
  await failure(InvalidArgumentError, box.sandbox.files.write("/tmp/pipe", "x"));
});

test("a full disk is said in the right words", async (story) => {
  const sandbox = await fresh(story);
  await run(sandbox, "fallocate -l $(($(df --output=avail -B1 / | tail -1) - 1048576)) /home/user/fill || true");
  await failure(NotEnoughSpaceError, sandbox.files.write("/home/user/more", bufferOf(randomBytes(64 << 20))));
  await run(sandbox, "rm -f fill more");
  await sandbox.files.write("/home/user/more", "fits");
});

test("the guest api wants its token", async () => {
  const { sandbox } = box;
  await sandbox.files.write("/tmp/t", "signed");
  const headers = route(sandbox.sandboxId, 49983);
  for (const token of [{}, { "X-Access-Token": "" }, { "X-Access-Token": "wrong" }]) {
    const file = await fetch(`${SERVER}/files?path=/tmp/t`, { headers: { ...headers, ...token } });
    assert.deepEqual([file.status, (await file.json()).code], [401, 401]);
    const call = await fetch(`${SERVER}/process.Process/List`, {
      method: "POST",
      body: "{}",
      headers: { ...headers, ...token, "Content-Type": "application/json" },
    });
    assert.deepEqual([call.status, (await call.json()).code], [401, 401]);
  }
  assert.equal((await fetch(`${SERVER}/health`, { headers })).status, 204);
  // A signed address stands for the token, for one file. Here it needs the routing headers, too.
  const download = await sandbox.downloadUrl("/tmp/t", { useSignatureExpiration: 60 });
  const answer = await fetch(download, { headers });
  assert.deepEqual([answer.status, await answer.text()], [200, "signed"]);
  assert.equal((await fetch(download.replace("%2Ft", "%2Fu"), { headers })).status, 401);
  const form = new FormData();
  form.append("file", new Blob(["by address"]), "ignored");
  const upload = await fetch(await sandbox.uploadUrl("/tmp/u"), { method: "POST", body: form, headers });
  assert.equal(upload.status, 200);
  assert.equal(await sandbox.files.read("/tmp/u"), "by address");
});

test("metadata follows its file", async () => {
  const { files } = box.sandbox;
  for (const folder of ["/home/user/labels", "/dev/shm/labels"]) {
    await files.makeDir(folder);
    const wanted = { author: "me", note: "two words" };
    const written = await files.write(`${folder}/a`, "1", { metadata: { Author: "me", note: "two words" } });
    assert.deepEqual(written.metadata, wanted);
    assert.deepEqual((await files.rename(`${folder}/a`, `${folder}/b`)).metadata, wanted);
    await run(box.sandbox, `echo more >> ${folder}/b; mkdir ${folder}/d; mv ${folder}/b ${folder}/d/c`);
    assert.deepEqual((await files.list(`${folder}/d`)).map(({ metadata }) => metadata), [wanted]);
    await files.write(`${folder}/d/c`, "2");
    assert.equal((await files.getInfo(`${folder}/d/c`)).metadata, undefined);
  }
});

test("metadata has bounds", async () => {
  const { files } = box.sandbox;
  for (const metadata of [{ ["k".repeat(247)]: "v" }, { k: "v".repeat(4096) }]) {
    await failure(InvalidArgumentError, files.write("/tmp/m", "1", { metadata }));
  }
  assert.equal(await files.exists("/tmp/m"), false);
});

test("metadata lives through pause and fork", async (story) => {
  const sandbox = await fresh(story);
  await sandbox.files.write("/home/user/f", "1", { metadata: { k: "v" } });
  const [copy] = await sandbox.fork();
  story.after(() => copy.kill());
  await sandbox.pause();
  await sandbox.connect();
  for (const { files } of [sandbox, copy]) {
    assert.deepEqual((await files.getInfo("/home/user/f")).metadata, { k: "v" });
  }
});
