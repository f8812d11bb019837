// Volumes: what several sandboxes share.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Sandbox, Volume } from "e2b";
import { failure, until } from "./support.mjs";

/** Deletes a volume whose last sandbox has just been killed. */
async function destroyed(volume) {
  await until(() => Volume.destroy(volume.volumeId).catch(() => false), "the volume is gone", 20_000);
}

test("a volume is made mounted and deleted", async () => {
  const volume = await Volume.create("js-made");
  assert.equal((await Volume.getInfo(volume.volumeId)).name, "js-made");
  assert.ok((await Volume.list()).some((one) => one.volumeId === volume.volumeId));
  const sandbox = await Sandbox.create({ timeoutMs: 120_000, volumeMounts: { "/mnt/data": volume } });
  const ran = await sandbox.commands.run("echo written > /mnt/data/file && cat /mnt/data/file");
  assert.equal(ran.stdout, "written\n");
  const error = await failure(Error, Volume.destroy(volume.volumeId));
  assert.match(error.message, /in use/);
  await sandbox.kill();
  await destroyed(volume);
  assert.equal(await Volume.destroy(volume.volumeId), false);
});

test("two sandboxes share a volume", async () => {
  const volume = await Volume.create("js-shared");
  const options = { timeoutMs: 120_000, volumeMounts: { "/mnt/data": "js-shared" } };
  const [one, other] = await Promise.all([Sandbox.create(options), Sandbox.create(options)]);
  await one.files.write("/mnt/data/a", "by one");
  assert.equal(await other.files.read("/mnt/data/a"), "by one");
  await other.commands.run("mv /mnt/data/a /mnt/data/b && echo more >> /mnt/data/b");
  assert.equal(await one.files.read("/mnt/data/b"), "by onemore\n");
  assert.equal(await one.files.exists("/mnt/data/a"), false);
  await Promise.all([one.kill(), other.kill()]);
  await destroyed(volume);
});
