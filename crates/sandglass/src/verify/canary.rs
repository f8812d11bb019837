//! What attacks are after: things of the stage that nothing in a sandbox may see, change or end.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use fs_err as fs;
use rand::RngExt as _;
use rustix::pipe::{PipeFlags, pipe_with};
use sandglass_linux::loopdev::LoopDevice;
use sandglass_linux::process::{Child, Launch, run as run_program, spawn};
use serde::Deserialize;
use serde_json::{Value, json};

use super::secrets::{Place, Secrets, fresh};

/// Size of the block device, in bytes.
const DEVICE_LEN: u64 = 8 << 20;

/// Where on it lies a secret that is in no file: in the first block, which ext4 leaves to boot loaders.
const DEVICE_SECRET_AT: u64 = 256;

/// How long its file system may take to be made.
const MKFS: Duration = Duration::from_secs(30);

/// How the file system knows [`Canaries::file`].
#[derive(Debug, Deserialize)]
pub(super) struct Handle {
    pub(super) kind: i32,
    /// In hexadecimal.
    pub(super) handle: String,
}

/// What is laid out. All of it ends with a stage.
#[derive(Debug)]
pub(super) struct Canaries {
    folder: PathBuf,
    /// Holds what only a process can hold, for as long as the line to it is open.
    holder: Child,
    line: File,
    handle: Handle,
    /// The key of its shared memory and of its queue.
    key: i32,
    device: LoopDevice,
}

impl Canaries {
    /// Lays them out below `home`. `program` is the guest's binary: what holds something runs it, too.
    pub(super) fn place(home: &Path, secrets: &Secrets, program: &Path) -> anyhow::Result<Self> {
        let folder = home.join("canaries");
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("file"), secrets.at(Place::File))?;
        let device = device(&folder, secrets).context("no block device as a canary")?;
        // Positive, and not 0, which would be a private segment.
        let key = rand::rng().random_range(1..i32::MAX);
        let at = |place| secrets.at(place);
        let told = json!({
            "key": key,
            "memory": at(Place::Memory),
            "mounts": at(Place::Mounts),
            "shared_memory": at(Place::SharedMemory),
            "queue": at(Place::Queue),
            "abstract_socket": at(Place::AbstractSocket),
            "socket": at(Place::Socket),
            "socket_path": folder.join("socket"),
            "file": folder.join("file"),
        });
        let (holder, line, handle) = holder(program, secrets, &told).context("no process as a canary")?;
        Ok(Self { folder, holder, line, handle, key, device })
    }

    /// Removes what a machine would keep of them that goes on.
    pub(super) fn remove(self) -> anyhow::Result<()> {
        drop(self.line);
        match self.holder.wait(Some(Instant::now() + MKFS))? {
            Some(_) => Ok(()),
            None => bail!("a canary does not end"),
        }
    }

    /// A file of the machine, which holds [`Place::File`].
    pub(super) fn file(&self) -> PathBuf {
        self.folder.join("file")
    }

    /// How that file can be opened without its path.
    pub(super) const fn handle(&self) -> &Handle {
        &self.handle
    }

    /// A socket that tells [`Place::Socket`] to whoever connects.
    pub(super) fn socket(&self) -> PathBuf {
        self.folder.join("socket")
    }

    /// The process that holds secrets.
    pub(super) fn holder(&self) -> i32 {
        self.holder.pid()
    }

    /// The key of the System V objects.
    pub(super) const fn key(&self) -> i32 {
        self.key
    }

    /// The block device.
    pub(super) const fn device(&self) -> &LoopDevice {
        &self.device
    }

    /// A folder for one attack.
    pub(super) fn fresh_folder(&self) -> anyhow::Result<PathBuf> {
        let path = self.folder.join(fresh());
        fs::create_dir(&path)?;
        Ok(path)
    }

    /// Another file of the machine, for one attack to change: its path, and what is in it.
    pub(super) fn fresh_file(&self) -> anyhow::Result<(PathBuf, String)> {
        let (path, content) = (self.folder.join(fresh()), fresh());
        fs::write(&path, &content)?;
        Ok((path, content))
    }

    /// Another process of the machine, for one attack to end.
    pub(super) fn victim(&self) -> anyhow::Result<Child> {
        Ok(spawn(&Launch::new("/bin/sleep")?.arg("3600")?)?)
    }
}

/// Ends a victim.
pub(super) fn bury(victim: &Child) -> anyhow::Result<()> {
    victim.pidfd().kill()?;
    if victim.wait(Some(Instant::now() + MKFS))?.is_none() {
        bail!("a canary does not end");
    }
    Ok(())
}

fn holder(program: &Path, secrets: &Secrets, told: &Value) -> anyhow::Result<(Child, File, Handle)> {
    let (stdin, input) = pipe_with(PipeFlags::CLOEXEC)?;
    let (output, stdout) = pipe_with(PipeFlags::CLOEXEC)?;
    let launch = Launch::new(program)?
        .args(["canary", secrets.at(Place::Arguments)])?
        .env("SANDGLASS_CANARY", secrets.at(Place::Environment))?
        .stdin(&stdin)?
        .stdout(&stdout)?;
    let holder = spawn(&launch)?;
    drop((launch, stdin, stdout));
    let mut line = File::from(input);
    writeln!(line, "{told}")?;
    let handle = serde_json::from_str(&first_line(output)?).context("it did not get ready")?;
    Ok((holder, line, handle))
}

fn first_line(output: OwnedFd) -> std::io::Result<String> {
    let mut line = String::new();
    BufReader::new(File::from(output)).read_line(&mut line)?;
    Ok(line)
}

/// A loop device with a file system. One secret is in a file of it, and one in its first block.
fn device(folder: &Path, secrets: &Secrets) -> anyhow::Result<LoopDevice> {
    let (tree, image) = (folder.join("tree"), folder.join("image"));
    fs::create_dir(&tree)?;
    fs::write(tree.join("file"), secrets.at(Place::DeviceFile))?;
    let file = fs::OpenOptions::new().read(true).write(true).create_new(true).open(&image)?;
    file.set_len(DEVICE_LEN)?;
    let mkfs = Launch::new("/sbin/mkfs.ext4")?
        .args(["-q", "-F", "-O", "^has_journal", "-d"])?
        .arg(&tree)?
        .arg(&image)?
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")?;
    let made = run_program(mkfs, b"", MKFS, 4096)?;
    if !made.status.success() {
        bail!("mkfs.ext4: {}: {}", made.status, String::from_utf8_lossy(&made.stderr));
    }
    rustix::io::pwrite(file.file(), secrets.at(Place::Device).as_bytes(), DEVICE_SECRET_AT)?;
    Ok(LoopDevice::attach(file.file())?)
}
