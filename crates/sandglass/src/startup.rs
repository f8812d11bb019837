//! Why a server does not start: one line with its remedy, and an exit code of its own.
//!
//! Scripts and service units rely on the codes: they never change their meaning. Those from 10 to 29 stay until a
//! person did something; those from 30 to 49 may pass by themselves, so that it makes sense to start again. 1 is for
//! everything else, 2 for a command line that makes no sense.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::path::Path;
use std::process::ExitCode;

use sandglass_control::template::TemplateError;
use sandglass_engine::EngineError;
use sandglass_engine::engine::Lack;
use sandglass_engine::network::NetworkError;
use sandglass_linux::privilege::PrivilegeError;
use sandglass_store::StoreError;
use sandglass_types::error::Chain;

/// What kept the server from starting. The number is the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Reason {
    NotRoot = 10,
    Config = 11,
    NoRunsc = 12,
    UnusableRunsc = 13,
    NoGuest = 14,
    ForeignFolder = 15,
    UnusableFolder = 16,
    NewerSchema = 17,
    DamagedStore = 18,
    NoLandlock = 19,
    NoCgroups = 20,
    NoNamespaces = 21,
    NoPacketFilter = 22,
    NoLoopDevices = 23,
    NoFileSystem = 24,
    Template = 25,
    Certificate = 26,
    MasterKey = 27,
    PortTaken = 30,
    NoSuchAddress = 31,
    FolderInUse = 32,
    DataFull = 33,
    CacheFull = 34,
    LoopDevicesUsedUp = 35,
    Mirror = 36,
    NoRoom = 37,
    Host = 38,
}

impl Reason {
    /// All of them.
    pub(crate) const ALL: [Self; 27] = [
        Self::NotRoot,
        Self::Config,
        Self::NoRunsc,
        Self::UnusableRunsc,
        Self::NoGuest,
        Self::ForeignFolder,
        Self::UnusableFolder,
        Self::NewerSchema,
        Self::DamagedStore,
        Self::NoLandlock,
        Self::NoCgroups,
        Self::NoNamespaces,
        Self::NoPacketFilter,
        Self::NoLoopDevices,
        Self::NoFileSystem,
        Self::Template,
        Self::Certificate,
        Self::MasterKey,
        Self::PortTaken,
        Self::NoSuchAddress,
        Self::FolderInUse,
        Self::DataFull,
        Self::CacheFull,
        Self::LoopDevicesUsedUp,
        Self::Mirror,
        Self::NoRoom,
        Self::Host,
    ];

    /// The exit code.
    pub(crate) const fn code(self) -> u8 {
        self as u8
    }

    /// The reason that a process ended with, if it ended for one.
    pub(crate) fn of_code(code: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| i32::from(reason.code()) == code)
    }

    /// What a person does about it, unless the case at hand has a better advice.
    pub(crate) const fn remedy(self) -> &'static str {
        match self {
            Self::NotRoot => "start it as root: it gives up all privilege itself",
            Self::Config => "correct the file or the command line; docs/operations.md lists the keys",
            Self::NoRunsc => {
                "install it: `scripts/setup.sh`, or `apt install runsc` (Debian 12: from bookworm-backports)"
            }
            Self::UnusableRunsc => "install runsc 20240729 or newer, as `scripts/setup.sh` does",
            Self::NoGuest => "build the program with `make build`",
            Self::ForeignFolder => "choose another --data-dir",
            Self::UnusableFolder => {
                "give it to root alone (`chown root:root`, `chmod go-w`) on a file system that can be written, or \
                 choose another"
            }
            Self::NewerSchema => "run the newer sandglass that wrote it",
            Self::DamagedStore => {
                "put back a copy of serve/store.db, or choose another --data-dir and see with `sandglass ledger` what \
                 the old one owns"
            }
            Self::NoLandlock => {
                "use a kernel from 5.13 on that has Landlock, switched on (`lsm=` on its command line)"
            }
            Self::NoCgroups => {
                "mount control groups with the controllers cpu, memory and pids at /sys/fs/cgroup, writable"
            }
            Self::NoNamespaces => {
                "allow namespaces: a kernel with CONFIG_NET_NS, and in a container CAP_SYS_ADMIN and CAP_NET_ADMIN"
            }
            Self::NoPacketFilter => "`apt install nftables`, on a kernel with CONFIG_NF_TABLES",
            Self::NoLoopDevices => {
                "load the `loop` module (`modprobe loop`); a container needs /dev/loop-control and the /dev/loopN"
            }
            Self::NoFileSystem => {
                "use a kernel with ext4 and overlayfs (`modprobe ext4 overlay`) and `apt install e2fsprogs`"
            }
            Self::Template | Self::Certificate => "do what the message says and start again",
            Self::MasterKey => {
                "put the right key back where the message says, or name its file in `broker.master_key_file`; without it \
                 the secrets and connections of teams are lost"
            }
            Self::PortTaken => "choose another with --listen, or stop the program that has it",
            Self::NoSuchAddress => "choose an address of this machine with --listen",
            Self::FolderInUse => "stop it, or give this one its own --data-dir",
            Self::DataFull => "free some room there, or give the file system more, and start again",
            Self::CacheFull => "free some room there, or choose another --cache-dir, and start again",
            Self::LoopDevicesUsedUp => "detach some (`losetup -a` lists them), or make more /dev/loopN",
            Self::Mirror => {
                "check that `apt-get update` works: the template comes from this machine's package mirror"
            }
            Self::NoRoom => "give the machine more memory, processes or open files, and start again",
            Self::Host => "see its log above, and `sandglass doctor`",
        }
    }
}

/// A start that failed.
#[derive(Debug)]
pub(crate) enum StartupError {
    /// Here.
    Failed {
        reason: Reason,
        /// What is wrong.
        what: String,
        /// What to do about it.
        remedy: Cow<'static, str>,
    },
    /// In the privileged half, which printed the line itself.
    Reported(Reason),
}

impl StartupError {
    /// A failure with the usual remedy of its reason.
    pub(crate) fn new(reason: Reason, what: impl Into<String>) -> Self {
        Self::with_remedy(reason, what, reason.remedy())
    }

    /// A failure with a remedy of its own.
    pub(crate) fn with_remedy(
        reason: Reason,
        what: impl Into<String>,
        remedy: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self::Failed { reason, what: what.into(), remedy: remedy.into() }
    }

    /// A folder, or what is in it, that could not be used.
    pub(crate) fn folder(folder: Folder, path: &Path, error: &io::Error) -> Self {
        let name = match folder {
            Folder::Data => "data",
            Folder::Cache => "cache",
        };
        let reason = match folder {
            Folder::Data if is_full(error) => Reason::DataFull,
            Folder::Cache if is_full(error) => Reason::CacheFull,
            _ => Reason::UnusableFolder,
        };
        Self::new(reason, format!("the {name} folder {} can't be used: {error}", path.display()))
    }

    /// Why.
    pub(crate) const fn reason(&self) -> Reason {
        match self {
            Self::Failed { reason, .. } | Self::Reported(reason) => *reason,
        }
    }
}

/// One of a server's two folders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Folder {
    Data,
    Cache,
}

impl fmt::Display for StartupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed { what, remedy, .. } => write!(f, "{what}: {remedy}"),
            Self::Reported(_) => f.write_str("the privileged half ended"),
        }
    }
}

impl std::error::Error for StartupError {}

impl From<StoreError> for StartupError {
    fn from(error: StoreError) -> Self {
        let reason = match &error {
            StoreError::NewerSchema { .. } => Reason::NewerSchema,
            StoreError::Full => Reason::DataFull,
            _ => Reason::DamagedStore,
        };
        Self::new(reason, Chain(&error).to_string())
    }
}

impl From<PrivilegeError> for StartupError {
    fn from(error: PrivilegeError) -> Self {
        let reason = match &error {
            PrivilegeError::NoLandlock => Reason::NoLandlock,
            _ => Reason::Host,
        };
        Self::new(reason, Chain(&error).to_string())
    }
}

impl From<EngineError> for StartupError {
    fn from(error: EngineError) -> Self {
        let reason = match &error {
            EngineError::NoRoom { lack: Lack::Disk, .. } => Reason::DataFull,
            EngineError::NoRoom { .. } => Reason::NoRoom,
            _ => Reason::Host,
        };
        Self::new(reason, format!("the engine can't start: {}", Chain(&error)))
    }
}

impl From<NetworkError> for StartupError {
    fn from(error: NetworkError) -> Self {
        let reason = match &error {
            NetworkError::Step { source, .. } if is_full(source) => Reason::DataFull,
            NetworkError::Seal(_) => Reason::NoPacketFilter,
            _ => Reason::NoNamespaces,
        };
        Self::new(reason, format!("the network can't start: {}", Chain(&error)))
    }
}

impl From<TemplateError> for StartupError {
    fn from(error: TemplateError) -> Self {
        use sandglass_control::template::BuildFailure;
        match &error {
            TemplateError::Build { name, failure, tail } => {
                tracing::error!("the last lines of the build:\n{tail}");
                let reason = match failure {
                    BuildFailure::Full => Reason::CacheFull,
                    BuildFailure::Mirror => Reason::Mirror,
                    BuildFailure::NoTools | BuildFailure::NotDebian | BuildFailure::Other => Reason::Template,
                };
                let what = format!("the template {name:?} could not be built");
                Self::with_remedy(reason, what, failure.remedy())
            }
            TemplateError::Step { source, .. } if is_full(source) => {
                Self::new(Reason::CacheFull, Chain(&error).to_string())
            }
            _ => Self::new(Reason::Template, Chain(&error).to_string()),
        }
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Prints why this process ends, in one line, and says with which code.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    let startup = error.downcast_ref::<StartupError>();
    if !matches!(startup, Some(StartupError::Reported(_))) {
        eprintln!("sandglass: {}", one_line(&format!("{error:#}")));
    }
    startup.map_or(ExitCode::FAILURE, |error| error.reason().code().into())
}

/// The text without what would break its line or move the terminal's cursor.
fn one_line(text: &str) -> String {
    text.trim_end().chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests;
