//! The processes of sandboxes: finding them all, stopping them, ending them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use sandglass_linux::process::{self, Entry, Launch, LaunchError, PidFd, ProcessIdentity, Step, spawn};
use sandglass_types::{InstanceId, SandboxId};

use super::folder::Folder;
use super::model::{Agent, Life, Model};
use crate::engine::{EngineError, Stats, step};
use crate::session::AgentStdio;

/// The variable in the environment of every agent that says whose it is: `INSTANCE/SANDBOX`.
pub const MARKER: &str = "SANDGLASS_SANDBOX";

/// Where an agent finds programs.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// How long stopped or killed processes may take to be so. Milliseconds are usual; one that waits for a disk may need
/// long.
const PATIENCE: Duration = Duration::from_secs(20);

/// The pause between two walks of `/proc`.
const BETWEEN_WALKS: Duration = Duration::from_millis(1);

/// The processes of one instance's sandboxes.
#[derive(Debug)]
pub(super) struct Processes {
    pub(super) instance: InstanceId,
    /// The agent's program, absolute, and its arguments.
    pub(super) program: PathBuf,
    pub(super) args: Vec<String>,
}

impl Model for Processes {
    fn start(&self, id: &SandboxId, folder: &Folder) -> Result<Agent, EngineError> {
        let failed = |error: LaunchError| step("start the agent", error);
        let stdio = folder.session().agent_stdio()?;
        let launch = self.launch(id, folder, &stdio).map_err(failed)?;
        let child = spawn(&launch).map_err(failed)?;
        match Agent::of(child.pid()) {
            Ok(agent) => Ok(agent),
            // It has ended already. No process has ever started at tick 0 but the kernel's own.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Ok(Agent { pid: child.pid(), start_ticks: 0 })
            }
            Err(error) => Err(step("look at the agent", error)),
        }
    }

    fn life(&self, _: &SandboxId, agent: Option<Agent>) -> Result<Life, EngineError> {
        let look = || -> io::Result<Life> {
            let Some(agent) = agent else { return Ok(Life::Gone) };
            let Some(fd) = agent.open()? else { return Ok(Life::Gone) };
            let stopped = process::is_stopped(agent.pid)?;
            // One that has ended and is not reaped yet still has its pid.
            Ok(match fd.wait_end(Some(Instant::now()))? {
                true => Life::Gone,
                false if stopped => Life::Stopped,
                false => Life::Running,
            })
        };
        look().map_err(|error| step("look at the agent", error))
    }

    fn alive(&self) -> Result<BTreeSet<SandboxId>, EngineError> {
        let look = || -> io::Result<BTreeSet<SandboxId>> {
            let mut alive = BTreeSet::new();
            // Those that have ended and are not reaped have no environment any more.
            for entry in process::table()? {
                alive.extend(mark_of(entry.identity.pid, &self.instance)?);
            }
            Ok(alive)
        };
        look().map_err(|error| step("look for processes", error))
    }

    fn stop(&self, id: &SandboxId, agent: Option<Agent>) -> Result<(), EngineError> {
        stop_until(&mut self.search(id, agent), Instant::now() + PATIENCE)
            .map_err(|error| step("stop the processes of the sandbox", error))
    }

    fn go_on(&self, id: &SandboxId, agent: Option<Agent>) -> Result<(), EngineError> {
        let go_on = || -> io::Result<()> {
            self.search(id, agent)
                .members()?
                .iter()
                .rev()
                .try_for_each(|member| member.fd.signal(Signal::CONT))
        };
        go_on().map_err(|error| step("let the processes of the sandbox run on", error))
    }

    fn kill(&self, id: &SandboxId, agent: Option<Agent>) -> Result<(), EngineError> {
        let mut search = self.search(id, agent);
        // What is stopped starts nothing more. It is no failure if that takes long: what is killed is killed.
        if let Err(error) = stop_until(&mut search, Instant::now() + PATIENCE) {
            tracing::debug!(%id, %error, "the processes of a dying sandbox were not stopped");
        }
        let deadline = Instant::now() + PATIENCE;
        let mut kill = || -> io::Result<()> {
            loop {
                let members = search.members()?;
                // The agent last: as long as it is there, it is the parent of what others leave.
                let alone = members.len() == 1;
                let dying: Vec<&Member> =
                    members.iter().filter(|member| alone || Some(member.entry.identity) != agent).collect();
                if dying.is_empty() {
                    return Ok(());
                }
                if Instant::now() >= deadline {
                    return Err(io::Error::new(
                        io::ErrorKind::TimedOut,
                        "they start others faster than they end",
                    ));
                }
                dying.iter().try_for_each(|member| member.fd.kill())?;
                for Member { entry, fd } in dying {
                    if !fd.wait_end(Some(deadline))? {
                        let said = format!("process {} does not end", entry.identity.pid);
                        return Err(io::Error::new(io::ErrorKind::TimedOut, said));
                    }
                }
            }
        };
        kill().map_err(|error| step("end the processes of the sandbox", error))
    }

    fn wait(&self, id: &SandboxId, agent: Option<Agent>) -> Result<(), EngineError> {
        let failed = |error: io::Error| step("wait for the sandbox", error);
        if let Some(agent) = agent {
            if let Some(fd) = agent.open().map_err(failed)? {
                fd.wait_end(None).map_err(failed)?;
            }
            return self.kill(id, Some(agent));
        }
        let mut search = self.search(id, None);
        while let Some(member) = search.members().map_err(failed)?.first() {
            member.fd.wait_end(None).map_err(failed)?;
        }
        Ok(())
    }

    /// The peak of their memory is not known to be more than what they use now.
    fn usage(&self, id: &SandboxId, agent: Option<Agent>) -> Result<Stats, EngineError> {
        let failed = |error: io::Error| step("read what the sandbox uses", error);
        let members = self.search(id, agent).members().map_err(failed)?;
        let total = |part: fn(&Entry) -> u64| members.iter().map(|member| part(&member.entry)).sum();
        let memory = |Member { entry, .. }: &Member| -> io::Result<u64> {
            let exactly = process::resident_bytes(entry.identity.pid)?;
            Ok(exactly.unwrap_or(entry.roughly_resident_bytes))
        };
        let memory_bytes = members.iter().map(memory).sum::<io::Result<u64>>().map_err(failed)?;
        Ok(Stats {
            cpu_micros: total(|entry| entry.cpu_micros),
            memory_bytes,
            memory_peak_bytes: memory_bytes,
            processes: total(|entry| entry.threads),
            disk_bytes: 0,
        })
    }
}

impl Processes {
    fn launch(&self, id: &SandboxId, folder: &Folder, stdio: &AgentStdio) -> Result<Launch, LaunchError> {
        let home = folder.home();
        let there = CString::new(home.as_os_str().as_bytes())?;
        Launch::new(&self.program)?
            .args(&self.args)?
            .arg(&home)?
            .env(MARKER, format!("{}/{id}", self.instance))?
            .env("HOME", &home)?
            .env("PATH", PATH)?
            .steps([Step::WorkingDirectory(there), Step::AdoptOrphans])
            .stdin(&stdio.stdin)?
            .stdout(&stdio.stdout)
    }

    fn search<'a>(&'a self, id: &'a SandboxId, agent: Option<Agent>) -> Search<'a> {
        Search { instance: &self.instance, id, agent, marked: HashMap::new() }
    }
}

/// Stops all that is found, until nothing else is.
fn stop_until(search: &mut Search<'_>, deadline: Instant) -> io::Result<()> {
    // In two walks, because one may miss what a process starts that is stopped only later in it.
    let mut at_rest = 0;
    while at_rest < 2 {
        at_rest += 1;
        for Member { entry, fd } in search.members()? {
            if !process::is_stopped(entry.identity.pid)? {
                fd.signal(Signal::STOP)?;
                at_rest = 0;
            }
        }
        if Instant::now() >= deadline && at_rest == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::sleep(BETWEEN_WALKS);
    }
    Ok(())
}

/// A search for the processes of one sandbox, which may be repeated.
#[derive(Debug)]
struct Search<'a> {
    instance: &'a InstanceId,
    id: &'a SandboxId,
    agent: Option<Agent>,
    /// Whether those that were looked at have the sandbox's marker: none loses or gets it as long as it lives, or only
    /// by its own doing.
    marked: HashMap<ProcessIdentity, bool>,
}

impl Search<'_> {
    /// The living processes of the sandbox, the agent first. Each is held by a descriptor, so that what is done to it
    /// is done to no other.
    fn members(&mut self) -> io::Result<Vec<Member>> {
        let table = process::table()?;
        let mut marked = BTreeSet::new();
        for Entry { identity, .. } in &table {
            let known = match self.marked.get(identity) {
                Some(known) => *known,
                None => {
                    let mark = mark_of(identity.pid, self.instance)?;
                    *self.marked.entry(*identity).or_insert(mark.as_ref() == Some(self.id))
                }
            };
            if known {
                marked.insert(identity.pid);
            }
        }
        let me = i32::try_from(std::process::id()).map_err(io::Error::other)?;
        let mut members = Vec::new();
        for entry in family(&table, self.agent, &marked, me) {
            if let Some(fd) = entry.identity.open()?
                && !fd.wait_end(Some(Instant::now()))?
            {
                members.push(Member { entry, fd });
            }
        }
        Ok(members)
    }
}

/// The sandbox of this instance that a process carries the marker of.
fn mark_of(pid: i32, instance: &InstanceId) -> io::Result<Option<SandboxId>> {
    Ok(process::environment(pid)?.and_then(|environment| marked_for(&environment, instance)))
}

/// A living process.
#[derive(Debug)]
struct Member {
    entry: Entry,
    fd: PidFd,
}

/// The sandbox of this instance that an environment names. The first marker counts.
fn marked_for(environment: &[u8], instance: &InstanceId) -> Option<SandboxId> {
    let value = environment
        .split(|byte| *byte == 0)
        .find_map(|variable| variable.strip_prefix(MARKER.as_bytes())?.strip_prefix(b"="))?;
    let (of, id) = std::str::from_utf8(value).ok()?.split_once('/')?;
    (of == instance.as_str()).then(|| id.parse().ok())?
}

/// The agent, all marked processes, and all descendants of those, the agent first; never this process or, through it,
/// what else it started.
fn family(table: &[Entry], agent: Option<Agent>, marked: &BTreeSet<i32>, me: i32) -> Vec<Entry> {
    let mut children: BTreeMap<i32, Vec<&Entry>> = BTreeMap::new();
    for entry in table {
        children.entry(entry.parent).or_default().push(entry);
    }
    let is_agent = |entry: &&Entry| Some(entry.identity) == agent;
    let mut found: Vec<Entry> = Vec::new();
    let mut seen = BTreeSet::from([me]);
    let mut next: Vec<&Entry> =
        table.iter().filter(|entry| !is_agent(entry) && marked.contains(&entry.identity.pid)).collect();
    // Taken from the end, so it is found first.
    next.extend(table.iter().find(is_agent));
    while let Some(entry) = next.pop() {
        if seen.insert(entry.identity.pid) {
            found.push(*entry);
            next.extend(children.get(&entry.identity.pid).into_iter().flatten());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(pid: i32, parent: i32) -> Entry {
        let identity = Agent { pid, start_ticks: 1 };
        Entry { identity, parent, cpu_micros: 0, threads: 1, roughly_resident_bytes: 0 }
    }

    fn pids(found: &[Entry]) -> Vec<i32> {
        found.iter().map(|entry| entry.identity.pid).collect()
    }

    #[test]
    fn a_family_is_all_that_descends_and_nobody_else() {
        // 1 started the host 2; the agent 10 is of 2 and has 11 and, of that, 12; 20 is marked and has 21.
        let table = [(1, 0), (2, 1), (20, 1), (21, 20), (12, 11), (11, 10), (10, 2), (30, 2)]
            .map(|(a, b)| entry(a, b));
        let agent = Some(Agent { pid: 10, start_ticks: 1 });
        let found = pids(&family(&table, agent, &BTreeSet::from([20, 12]), 2));
        assert_eq!(found[0], 10);
        assert_eq!(found.iter().copied().collect::<BTreeSet<_>>(), BTreeSet::from([10, 11, 12, 20, 21]));
        assert_eq!(found.len(), 5);
        // The pid of the agent is another process's now.
        let reused = Some(Agent { pid: 10, start_ticks: 9 });
        assert_eq!(pids(&family(&table, reused, &BTreeSet::new(), 2)), [0; 0]);
        // A host that was itself started in a sandbox is not of it, nor is what it starts.
        assert_eq!(pids(&family(&table, None, &BTreeSet::from([1, 2]), 2)), [1, 20, 21]);
    }

    #[test]
    fn a_mark_is_of_one_instance_and_one_sandbox() {
        let instance: InstanceId = "aaaaaaaa".parse().unwrap();
        let id = SandboxId::random();
        let marked = |text: String| marked_for(text.as_bytes(), &instance);
        assert_eq!(marked(format!("A=1\0{MARKER}=aaaaaaaa/{id}\0B=2\0")), Some(id.clone()));
        for text in [
            String::new(),
            format!("{MARKER}=bbbbbbbb/{id}\0"),
            format!("X{MARKER}=aaaaaaaa/{id}\0"),
            format!("{MARKER}=aaaaaaaa/../..\0"),
            format!("{MARKER}=bbbbbbbb/{id}\0{MARKER}=aaaaaaaa/{id}\0"),
            format!("{MARKER}X=aaaaaaaa/{id}\0"),
        ] {
            assert_eq!(marked(text.clone()), None, "{text}");
        }
    }
}
