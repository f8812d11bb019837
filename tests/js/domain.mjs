// Told by test_domain.py: with a domain and a proxy alone, and no address.

import { Sandbox } from "e2b";
const proxy = process.argv[2];
const sandbox = await Sandbox.create({ timeoutMs: 60_000, proxy });
await sandbox.files.write("/home/user/x.txt", "kept");
const { stdout } = await sandbox.commands.run("cat x.txt");
const host = sandbox.getHost(8000);
await sandbox.kill();
console.log(JSON.stringify({ said: stdout, host }));
process.exit(0);
