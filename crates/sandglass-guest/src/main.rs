//! The agent in every sandbox: PID 1, the guest API, and what `sudo` talks to.
//!
//! One binary under several names: as PID 1, or with `init`, it is the agent; as `sudo` it is the client that
//! asks the agent to run a command as another user; with `serve` it serves the guest API on a TCP port, for
//! development; with `unsealed` it is the agent of a sandbox that nothing isolates; with `probe` it attacks what is around
//! it, for `sandglass verify`; with `worker` it does a task with the help of a model.

mod agent;
mod blocking;
mod clock;
mod deleted;
mod dev;
mod exec;
mod files;
mod filesystem;
mod guard;
mod hooks;
mod http;
mod identity;
mod in_use;
mod init;
mod job;
mod journal;
mod log;
mod memory;
mod metadata;
mod path;
mod probe;
mod process;
mod processes;
mod reaper;
mod session;
mod settings;
mod sudo;
mod unsealed;
mod users;
mod worker;

use std::process::ExitCode;

fn main() -> ExitCode {
    memory::limit_allocator();
    let mut args = std::env::args();
    let name = args.next().unwrap_or_default();
    if name.rsplit('/').next() == Some("sudo") {
        return sudo::main(args);
    }
    if std::process::id() == 1 {
        return init::main();
    }
    match args.next().as_deref() {
        Some("serve") => dev::main(args),
        Some("unsealed") => unsealed::main(args),
        Some("probe") => probe::main(args),
        Some("canary") => probe::canary(),
        Some("worker") => worker::main(args),
        _ => {
            log::line(
                "usage: sandglass-guest serve --listen ADDRESS:PORT, or unsealed HOME; as process 1 it is a sandbox's \
                 agent",
            );
            ExitCode::from(2)
        }
    }
}
