//! All points. A rule of the workspace checks that each is in the code exactly once, and no other.

/// The names, in the order in which a sandbox passes them.
pub const NAMES: [&str; 131] = [
    // The unprivileged half, bringing up.
    "control.create.insert",
    "control.create.own",
    "control.create.host",
    "control.create.guard",
    "control.create.start",
    "control.create.attach",
    "control.create.configure",
    "control.create.reachable",
    // The unprivileged half, making sandboxes before anybody asks, and handing them out.
    "control.pool.host",
    "control.pool.still",
    "control.pool.claim",
    "control.pool.instead",
    // The unprivileged half, storing a move, before it is stored.
    "control.store.running",
    "control.store.pausing",
    "control.store.paused",
    "control.store.ending",
    "control.store.ended",
    // The unprivileged half, moving an end, after the host keeps one that is later and before the store has it.
    "control.deadline.store",
    // The unprivileged half, pausing and resuming.
    "control.pause.freeze",
    "control.pause.host",
    "control.pause.image",
    "control.prepare.host",
    "control.resume.store",
    "control.resume.host",
    "control.resume.boot",
    // The unprivileged half, writing an image while its sandbox runs on, and removing it.
    "control.snapshot.insert",
    "control.snapshot.freeze",
    "control.snapshot.host",
    "control.snapshot.image",
    "control.snapshot.go_on",
    "control.snapshot.flush",
    "control.snapshot.ready",
    "control.snapshot.delete",
    "control.snapshot.remove",
    "control.snapshot.forget",
    // The unprivileged half, making copies from it.
    "control.fork.insert",
    "control.fork.children",
    "control.copy.host",
    "control.template.cold",
    // The unprivileged half, having an image compressed that nobody has used for long, and expanded when somebody wants it.
    "control.compress.host",
    "control.expand.host",
    // The unprivileged half, making a call of a model: before its money is set aside, before it is sent, before it is charged.
    "gateway.call.reserve",
    "gateway.call.send",
    "gateway.call.charge",
    // The unprivileged half, making a volume, and deleting it.
    "control.volume.insert",
    "control.volume.host",
    "control.volume.ready",
    "control.volume.delete",
    "control.volume.remove",
    "control.volume.forget",
    // The unprivileged half, moving a run: before it is stored, its sandbox asked for, known, its agent started, its checks run, its
    // sandbox removed, what it left collected, its money settled, and its end stored.
    "control.run.insert",
    "control.run.create",
    "control.run.ready",
    "control.run.agent",
    "control.run.verify",
    "control.run.destroy",
    "control.run.collect",
    "control.run.settle",
    "control.run.end",
    // The unprivileged half, ending.
    "control.kill.receive",
    "control.kill.answer",
    "control.end.destroy",
    // The unprivileged half, comparing store and machine.
    "control.reconcile.list",
    "control.reconcile.rows",
    "control.reconcile.repair",
    // The privileged half, making a sandbox.
    "engine.create.folder",
    "engine.create.record",
    "engine.create.disk",
    "engine.create.network",
    "engine.create.files",
    "engine.create.group",
    "engine.create.attach",
    "engine.create.stdio",
    "engine.create.spawned",
    "engine.create.made",
    "engine.create.watch",
    "engine.create.save",
    // The privileged half, starting it.
    "engine.start.expect",
    "engine.start.link",
    "engine.start.network",
    "engine.start.root",
    "engine.start.save",
    // The privileged half, making one ahead for an image.
    "engine.prepare.freeze",
    // The privileged half, bringing an image back in it.
    "engine.restore.begin",
    "engine.restore.network",
    "engine.restore.memory",
    "engine.restore.save",
    // The privileged half, letting one go on that was made for nobody.
    "engine.pool.used",
    "engine.pool.signal",
    // The privileged half, removing it.
    "engine.remove.begin",
    "engine.remove.kill",
    "engine.remove.forget",
    "engine.remove.group",
    "engine.remove.detach",
    "engine.remove.folder",
    "engine.remove.done",
    // The privileged half, in the cache folder: after it said what it needs, before it uses that; and after it took away what
    // nobody needs, before that is removed.
    "engine.cache.pinned",
    "engine.cache.swept",
    // The privileged half, with volumes.
    "engine.volume.format",
    "engine.volume.rename",
    "engine.volume.remove",
    "engine.volume.attach",
    "engine.worker.start",
    // Reading the files of a sandbox from outside: the unprivileged half, and the privileged one.
    "control.collect.begin",
    "engine.collect.attach",
    // The watchdog, once it has the lock of the data folder.
    "watchdog.end",
    // Network slots.
    "network.slot.pin",
    "network.slot.pin_airlock",
    "network.slot.seal",
    "network.slot.inside",
    "network.slot.outside",
    "network.slot.ready",
    "network.assign.remember",
    "network.assign.rename",
    "network.release.cut",
    "network.release.unpin",
    "network.release.forget",
    // Checkpoint images.
    "engine.flush.image",
    "engine.image.begin",
    "engine.image.checkpoint",
    "engine.image.sync",
    "engine.image.copy",
    "engine.image.describe",
    "engine.image.finish",
    // Images in their other form: before it is begun, checked, in place of the one before, and alone.
    "engine.compress.begin",
    "engine.compress.verify",
    "engine.compress.swap",
    "engine.compress.swapped",
    "engine.expand.begin",
    "engine.expand.swap",
    "engine.expand.swapped",
];
