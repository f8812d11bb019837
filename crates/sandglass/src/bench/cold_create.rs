//! From asking for a sandbox to the first output of a command in it.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use fs_err as fs;
use sandglass_control::template;
use sandglass_engine::gvisor::HostPaths;
use sandglass_engine::gvisor::bare::{Bare, Command};
use sandglass_linux::lock::FolderLock;

use super::millis;
use super::report::{Bound, Report};
use super::server::{Endpoint, Server};
use super::wire::Connection;
use crate::cli;
use crate::data_dir::DataDir;
use crate::guest_binary;
use crate::serve::find_runsc;

const COMMAND: &str = "echo hi";
const OUTPUT: &[u8] = b"hi\n";

/// How slow it may be, as a multiple of the reference.
const MAX_RATIO: f64 = 1.0;

pub(crate) async fn run(
    server: &Server,
    endpoint: &Endpoint,
    common: &cli::bench::Common,
    samples: &cli::bench::Samples,
    report: &mut Report,
) -> anyhow::Result<()> {
    let reference = Reference::open(server, common)?;
    let api = endpoint.api()?;
    let (mut subjects, mut created, mut references) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..samples.warmup + samples.n {
        server.rest().await?;
        let mut ours = report.keep(subject(endpoint).await);
        if let Some(Subject { id, .. }) = &ours {
            let gone = async {
                api.kill(id).await?;
                server.settle(id).await
            };
            if report.keep(gone.await).is_none() {
                ours = None;
            }
        }
        server.rest().await?;
        let bare = report.keep(reference.run());
        if round >= samples.warmup {
            created.extend(ours.as_ref().map(|ours| millis(ours.created)));
            subjects.extend(ours.map(|ours| millis(ours.first_output)));
            references.extend(bare.map(millis));
        }
    }
    let ours = report.series("create to first output", "ms", subjects);
    report.series("of it, create", "ms", created);
    let bare = report.series("reference: runsc run", "ms", references);
    let ratio = ours.zip(bare).map(|(ours, bare)| ours.p50 / bare.p50);
    report.target("p50 against the reference's", Bound::AtMost, MAX_RATIO, "times", ratio);
    Ok(())
}

struct Subject {
    id: String,
    created: Duration,
    first_output: Duration,
}

/// One sandbox. Connecting is timed, because the first request of a process that uses the SDK pays for it, too.
async fn subject(endpoint: &Endpoint) -> anyhow::Result<Subject> {
    let started = Instant::now();
    let mut connection = Connection::open(&endpoint.url).await?;
    let sandbox = connection.create(&endpoint.key).await?;
    let created = started.elapsed();
    let mut events = connection.shell(&sandbox, COMMAND).await?;
    let output = events.first_stdout().await?;
    let first_output = started.elapsed();
    if output != OUTPUT {
        bail!("the command wrote {:?}", String::from_utf8_lossy(&output));
    }
    events.end().await?;
    events.drain().await?;
    Ok(Subject { id: sandbox.id, created, first_output })
}

/// The same command under a bare `runsc run`, in a folder of its own that the ledger can be asked about.
struct Reference {
    bare: Bare,
    command: Command,
    _lock: FolderLock,
}

impl Reference {
    fn open(server: &Server, common: &cli::bench::Common) -> anyhow::Result<Self> {
        let base = template::load(server.cache(), "base")?.context("the template is not prepared")?;
        let rootfs = template::rootfs_dir(server.cache(), base.rootfs);
        let passwd = fs::read_to_string(rootfs.join("etc/passwd"))?;
        let user = ids_of(&passwd, &base.default_user).context("the template has no user")?;
        let (data, lock) = DataDir::open_or_create(&server.reference(), cli::Engine::Gvisor)?;
        let paths = HostPaths { data: data.host(), cache: server.cache().to_owned() };
        let runsc = find_runsc(common.runsc.as_deref())?;
        let guest = guest_binary::install(server.cache(), None)?;
        let mut env: Vec<String> = base.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
        env.push(format!("HOME={}", base.default_workdir));
        env.push(format!("USER={}", base.default_user));
        Ok(Self {
            bare: Bare::open(&paths, data.instance(), &runsc, &guest, &base.rootfs)?,
            command: Command {
                argv: ["/bin/bash", "-l", "-c", COMMAND].map(str::to_owned).to_vec(),
                user,
                cwd: base.default_workdir,
                env,
            },
            _lock: lock,
        })
    }

    fn run(&self) -> anyhow::Result<Duration> {
        let run = self.bare.run(&self.command).context("the reference failed")?;
        if run.stdout != OUTPUT {
            bail!("the reference wrote {:?}", String::from_utf8_lossy(&run.stdout));
        }
        Ok(run.first_output)
    }
}

/// `passwd(5)`: name, password, user id, group id, …
fn ids_of(passwd: &str, name: &str) -> Option<(u32, u32)> {
    let line = passwd.lines().find(|line| line.split(':').next() == Some(name))?;
    let mut fields = line.split(':').skip(2);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_found_by_their_whole_name() {
        let passwd = "root:x:0:0:root:/root:/bin/bash\nuser2:x:7:8::/:/bin/sh\nuser:x:1000:1001::/home/user:/bin/bash\n";
        assert_eq!(ids_of(passwd, "user"), Some((1000, 1001)));
        assert_eq!(ids_of(passwd, "use"), None);
        assert_eq!(ids_of("user:x:a:b", "user"), None);
    }
}
