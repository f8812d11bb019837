//! Named points in the code where a test makes a step hang, fail or panic.
//!
//! They are compiled into the program that ships, so that what is tested is what ships. They are off unless the
//! environment of the process that starts a server arms some: `SANDGLASS_FAILPOINTS=engine.create.disk=hang`, several
//! separated by `;`. Nothing that a client or a guest sends can arm one. One that is off costs a single atomic load.
//!
//! | action | what happens at the point |
//! |---|---|
//! | `hang` | one line on standard error, `failpoint NAME reached`, and the thread or task goes no further |
//! | `error` | the step fails with [`Injected`] |
//! | `panic` | a panic |
//!
//! `ACTION*N` acts on the first N passes only.
#![forbid(unsafe_code)]

mod names;

use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

pub use names::NAMES;

/// The variable of the environment that arms points.
pub const VARIABLE: &str = "SANDGLASS_FAILPOINTS";

static ARMED: OnceLock<Failpoints> = OnceLock::new();

/// The failure of a step that was told to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the failpoint {0} made it fail")]
pub struct Injected(pub &'static str);

impl From<Injected> for io::Error {
    fn from(injected: Injected) -> Self {
        Self::other(injected)
    }
}

/// A text that does not say which points to arm.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// Not `NAME=ACTION`.
    #[error("{0:?} is not NAME=ACTION or NAME=ACTION*N")]
    Form(String),
    /// A name that no point has.
    #[error("there is no failpoint {0:?}")]
    Name(String),
    /// Something else than the three actions.
    #[error("{0:?} is none of hang, error and panic")]
    Action(String),
    /// One name twice.
    #[error("the failpoint {0} is set twice")]
    Twice(&'static str),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Hang,
    Error,
    Panic,
}

#[derive(Debug)]
struct Armed {
    name: &'static str,
    action: Action,
    /// How many more passes it acts on.
    left: AtomicU32,
}

impl Armed {
    /// Whether this pass is one that it acts on.
    fn acts(&self) -> bool {
        let take = |left: u32| if left == u32::MAX { Some(left) } else { left.checked_sub(1) };
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }
}

/// Which points do what.
#[derive(Debug)]
pub struct Failpoints(Vec<Armed>);

impl FromStr for Failpoints {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let mut all: Vec<Armed> = Vec::new();
        for part in text.split(';') {
            let armed = parse(part)?;
            if all.iter().any(|other| other.name == armed.name) {
                return Err(ParseError::Twice(armed.name));
            }
            all.push(armed);
        }
        Ok(Self(all))
    }
}

fn parse(part: &str) -> Result<Armed, ParseError> {
    let form = || ParseError::Form(part.to_owned());
    let (name, action) = part.split_once('=').ok_or_else(form)?;
    let (action, left) = match action.split_once('*') {
        None => (action, u32::MAX),
        Some((action, passes)) => {
            let passes = passes.parse().ok().filter(|passes| (1..u32::MAX).contains(passes));
            (action, passes.ok_or_else(form)?)
        }
    };
    let name = NAMES.iter().find(|known| **known == name).ok_or_else(|| ParseError::Name(name.to_owned()))?;
    let action = match action {
        "hang" => Action::Hang,
        "error" => Action::Error,
        "panic" => Action::Panic,
        other => return Err(ParseError::Action(other.to_owned())),
    };
    Ok(Armed { name, action, left: AtomicU32::new(left) })
}

impl fmt::Display for Failpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, Armed { name, action, .. }) in self.0.iter().enumerate() {
            let action = format!("{action:?}").to_lowercase();
            write!(f, "{}{name}={action}", if n == 0 { "" } else { ";" })?;
        }
        Ok(())
    }
}

impl Failpoints {
    /// Arms them in this process, for as long as it lives. `false` if some were armed before, and these are not.
    pub fn arm(self) -> bool {
        ARMED.set(self).is_ok()
    }

    fn at(&self, name: &str) -> Option<&Armed> {
        self.0.iter().find(|armed| armed.name == name && armed.acts())
    }
}

/// What a pass is told to do.
fn pass(name: &str) -> Option<&'static Armed> {
    ARMED.get()?.at(name)
}

/// For whoever waits for this moment.
fn announce(name: &str) {
    eprintln!("failpoint {name} reached");
}

/// A point in code that may block its thread. `name` is one of [`NAMES`].
///
/// # Errors
/// It was told to.
///
/// # Panics
/// It was told to.
pub fn hit(name: &'static str) -> Result<(), Injected> {
    let Some(armed) = pass(name) else { return Ok(()) };
    act(armed, name)?;
    announce(name);
    loop {
        std::thread::park();
    }
}

/// A point in code that must not block: where it hangs, the task does not go on, and others do.
///
/// # Errors
/// It was told to.
///
/// # Panics
/// It was told to.
pub async fn hit_async(name: &'static str) -> Result<(), Injected> {
    let Some(armed) = pass(name) else { return Ok(()) };
    act(armed, name)?;
    announce(name);
    std::future::pending().await
}

/// All but hanging, after which this returns.
fn act(armed: &Armed, name: &'static str) -> Result<(), Injected> {
    match armed.action {
        Action::Hang => Ok(()),
        Action::Error => Err(Injected(name)),
        Action::Panic => panic!("the failpoint {name} made this panic"),
    }
}

#[cfg(test)]
mod tests;
