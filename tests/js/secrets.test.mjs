// Secrets: values that come in and never go out.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Secret } from "e2b";
import { failure } from "./support.mjs";

test("a secret is made changed found and destroyed", async () => {
  const made = await Secret.create("js-key", "the first value", { metadata: { for: "tests" } });
  assert.equal(made.version, 1);
  const changed = await Secret.update("js-key", "the second value");
  assert.deepEqual([changed.secretId, changed.version, changed.metadata], [made.secretId, 2, { for: "tests" }]);
  assert.equal((await Secret.getInfo(made.secretId)).name, "js-key");
  assert.ok((await Secret.list().nextItems()).some((one) => one.secretId === made.secretId));
  const error = await failure(Error, Secret.create("js-key", "the third value"));
  assert.match(error.message, /already/);
  assert.equal(await Secret.destroy(made.secretId), true);
  assert.equal(await Secret.exists("js-key"), false);
  assert.equal(await Secret.destroy("js-key"), false);
});

test("secrets are listed page by page", async () => {
  const made = [];
  for (const number of [1, 2, 3]) made.push((await Secret.create(`js-page-${number}`, "some value")).secretId);
  const pages = Secret.list({ limit: 1 });
  const found = [];
  while (pages.hasNext) found.push(...(await pages.nextItems()).map((one) => one.secretId));
  assert.deepEqual(found.filter((id) => made.includes(id)), made.reverse());
  for (const id of made) await Secret.destroy(id);
});
