//! Commands, each in a group of processes of its own that ends with its time.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::json;
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;
use tokio::sync::oneshot;
use tokio::time::{MissedTickBehavior, interval, sleep_until, timeout};

use crate::worker::event::{Events, clip, pieces};
use crate::worker::excerpt::Excerpt;

/// How long a command may take, unless the model says otherwise, and at most; in seconds.
const TIME: u64 = 120;
const MAX_TIME: u64 = 600;

/// How long output is waited for after the command ended: what it left running may hold the pipe.
const REST: Duration = Duration::from_millis(200);

/// How often output is told while it comes.
const TELL: Duration = Duration::from_millis(200);

/// Most of one command's output that is told in events, in bytes.
const MAX_TOLD: usize = 64 << 10;

/// Variables that lead to models, which no command needs to know.
pub(super) const HIDDEN: [&str; 6] = [
    "SANDGLASS_MODEL_TOKEN",
    "SANDGLASS_MODEL_URL",
    "ANTHROPIC_API_KEY",
    "ANTHROPIC_BASE_URL",
    "OPENAI_API_KEY",
    "OPENAI_BASE_URL",
];

/// Runs commands.
pub(in crate::worker) struct Shell<'a> {
    folder: PathBuf,
    events: &'a Events,
    most: usize,
    count: AtomicU32,
}

/// How a command ended.
#[derive(Debug)]
pub(in crate::worker) struct Ended {
    /// Its output, cut in the middle.
    pub output: String,
    /// How it ended, in words.
    pub end: String,
    /// Whether its code was 0.
    pub well: bool,
}

impl Ended {
    /// What the model is told.
    pub(super) fn told(self) -> Result<String, String> {
        let line_break = if self.output.is_empty() || self.output.ends_with('\n') { "" } else { "\n" };
        let text = format!("{}{line_break}[{}]", self.output, self.end);
        if self.well { Ok(text) } else { Err(text) }
    }
}

/// A group of processes, which ends with this.
struct Group(Option<Pid>);

impl Group {
    fn kill(&mut self) {
        if let Some(pid) = self.0.take() {
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill();
    }
}

impl<'a> Shell<'a> {
    /// One that runs them in a folder, and keeps so many bytes of each output.
    pub(in crate::worker) fn new(folder: &Path, events: &'a Events, most: usize) -> Self {
        Self { folder: folder.into(), events, most, count: AtomicU32::new(0) }
    }

    /// Runs one to its end, or to the end of its time in seconds. If this is dropped before, it is ended.
    pub(in crate::worker) async fn run(&self, command: &str, seconds: Option<u64>) -> Ended {
        let id = format!("x{}", self.count.fetch_add(1, Ordering::Relaxed) + 1);
        self.events.say("shell.started", &json!({"exec_id": id, "command": clip(command)}));
        let started = Instant::now();
        let time = Duration::from_secs(seconds.unwrap_or(TIME).clamp(1, MAX_TIME));
        let mut output = Excerpt::new(self.most / 4, self.most - self.most / 4);
        let end = match self.start(command) {
            Ok((child, pipe)) => self.follow(&id, child, pipe, time, &mut output).await,
            Err(error) => Err(format!("it could not be started: {error}")),
        };
        let (code, timed_out) = (end.as_ref().ok().and_then(ExitStatus::code), end.is_err());
        let (output_bytes, truncated) = (output.total, output.left_out() > 0);
        let duration = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.events.say(
            "shell.exited",
            &json!({
                "exec_id": id, "exit_code": code, "duration_ms": duration, "output_bytes": output_bytes,
                "truncated": truncated, "timed_out": timed_out,
            }),
        );
        let well = end.as_ref().is_ok_and(ExitStatus::success);
        let end = end.map_or_else(|error| error, |status| status.to_string());
        Ended { output: output.text(), end, well }
    }

    fn start(&self, command: &str) -> io::Result<(Child, pipe::Receiver)> {
        let (receiver, sender) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let shell = if Path::new("/bin/bash").exists() { "/bin/bash" } else { "/bin/sh" };
        let mut program = Command::new(shell);
        program.arg("-c").arg(command).current_dir(&self.folder).process_group(0);
        program.stdin(Stdio::null()).stdout(sender.try_clone()?).stderr(sender);
        for name in HIDDEN {
            program.env_remove(name);
        }
        let child = program.spawn()?;
        Ok((child, pipe::Receiver::from_owned_fd(receiver)?))
    }

    async fn follow(
        &self,
        id: &str,
        mut child: Child,
        mut pipe: pipe::Receiver,
        time: Duration,
        output: &mut Excerpt,
    ) -> Result<ExitStatus, String> {
        let mut group = Group(i32::try_from(child.id()).ok().and_then(Pid::from_raw));
        let deadline = tokio::time::Instant::now() + time;
        let (tell_end, mut ended) = oneshot::channel();
        // It ends with the group.
        tokio::task::spawn_blocking(move || tell_end.send(child.wait()));
        let mut teller = Teller { events: self.events, id, waiting: Vec::new(), told: 0 };
        let mut tick = interval(TELL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut buffer = vec![0; 64 << 10];
        let mut open = true;
        let status = loop {
            tokio::select! {
                read = pipe.read(&mut buffer), if open => match read {
                    Ok(0) | Err(_) => open = false,
                    Ok(len) => {
                        output.add(&buffer[..len]);
                        teller.add(&buffer[..len]);
                    }
                },
                status = &mut ended => break match status {
                    Ok(Ok(status)) => Ok(status),
                    Ok(Err(error)) => Err(format!("nobody knows how it ended: {error}")),
                    Err(_) => Err("nobody knows how it ended".into()),
                },
                _ = tick.tick() => teller.tell(),
                () = sleep_until(deadline) => {
                    group.kill();
                    break Err(format!("ended after {} s, because it took too long", time.as_secs()));
                }
            }
        };
        // Something may still be in the pipe; what was left running goes on, and is not heard any more.
        while open && let Ok(Ok(len @ 1..)) = timeout(REST, pipe.read(&mut buffer)).await {
            output.add(&buffer[..len]);
            teller.add(&buffer[..len]);
            open = tokio::time::Instant::now() < deadline + REST;
        }
        teller.tell();
        // It ended by itself: what it started in the background may be a server that the next command asks.
        group.0 = None;
        status
    }
}

/// Tells output while it comes.
struct Teller<'a> {
    events: &'a Events,
    id: &'a str,
    waiting: Vec<u8>,
    told: usize,
}

impl Teller<'_> {
    fn add(&mut self, bytes: &[u8]) {
        let room = MAX_TOLD - self.told - self.waiting.len();
        self.waiting.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    fn tell(&mut self) {
        // A character that is not whole yet waits for its rest.
        let whole = match std::str::from_utf8(&self.waiting) {
            Err(error) if error.error_len().is_none() && error.valid_up_to() > 0 => error.valid_up_to(),
            _ => self.waiting.len(),
        };
        let bytes: Vec<u8> = self.waiting.drain(..whole).collect();
        self.told += bytes.len();
        for piece in pieces(&String::from_utf8_lossy(&bytes)) {
            self.events.say("shell.output", &json!({"exec_id": self.id, "text": piece}));
        }
    }
}
