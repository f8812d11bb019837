//! The attacks of `sandglass verify`, carried out from inside: `guest probe NAME ARGUMENT…`. What one says is for a
//! person; a witness outside judges.
//!
//! An attack tries every way that it knows and prints what it got; one that is told to hold on to something prints `ready`
//! when it did, and waits to be ended. None does harm to what it was not pointed at.

mod canary;
mod egress;
mod isolation;
mod kernel;
mod limits;

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::Duration;

pub(crate) use canary::main as canary;

/// Longer than any probe takes, and not for ever.
const HOLD: Duration = Duration::from_secs(120);

/// Length of a secret, in bytes: hexadecimal digits.
const SECRET: usize = 32;

/// An attack, given its arguments.
type Attack = fn(&[String]) -> io::Result<()>;

/// An attack by its name.
fn attack(name: &str) -> Option<Attack> {
    let all = [isolation::ATTACKS, kernel::ATTACKS, limits::ATTACKS, egress::ATTACKS];
    all.into_iter().flatten().find(|(known, _)| *known == name).map(|(_, attack)| *attack)
}

/// Carries one out.
pub(crate) fn main(mut args: impl Iterator<Item = String>) -> ExitCode {
    let name = args.next().unwrap_or_default();
    let args: Vec<String> = args.collect();
    let Some(attack) = attack(&name) else {
        eprintln!("no probe {name:?}");
        return ExitCode::from(2);
    };
    let outcome = attack(&args);
    isolation::clear_up();
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// What came of several ways to the same.
#[derive(Default)]
struct Last {
    worked: bool,
    error: Option<io::Error>,
}

impl Last {
    fn see(&mut self, result: io::Result<()>) {
        match result {
            Ok(()) => self.worked = true,
            Err(error) => self.error = Some(error),
        }
    }

    /// An error if none worked.
    fn into_result(self) -> io::Result<()> {
        match self.error {
            Some(error) if !self.worked => Err(error),
            _ => Ok(()),
        }
    }
}

/// Prints what an attack got.
fn tell(got: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(got)?;
    out.write_all(b"\n")?;
    out.flush()
}

/// Those texts in some bytes that may be secrets, a line each.
fn secrets_in(bytes: &[u8]) -> Vec<u8> {
    let hexadecimal = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let runs = bytes.split(|byte| !hexadecimal(byte)).filter(|run| run.len() >= SECRET);
    runs.flat_map(|run| run.iter().copied().chain([b'\n'])).collect()
}

/// The argument of a place.
fn argument(args: &[String], index: usize) -> io::Result<&str> {
    let lacks = || io::Error::new(io::ErrorKind::InvalidInput, "an argument lacks");
    args.get(index).map(String::as_str).ok_or_else(lacks)
}

/// The argument of a place, of a kind.
fn number<T: std::str::FromStr>(args: &[String], index: usize) -> io::Result<T> {
    argument(args, index)?.parse().map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "no number"))
}

/// Says that something is held, and holds it until somebody ends this process.
fn hold(held: impl Sized) -> io::Result<()> {
    tell(b"ready")?;
    std::thread::sleep(HOLD);
    drop(held);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_attack_has_a_name_of_its_own() {
        let all = [isolation::ATTACKS, kernel::ATTACKS, limits::ATTACKS];
        let names: Vec<_> = all.into_iter().flatten().map(|(name, _)| *name).collect();
        let different: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(different.len(), names.len());
    }

    #[test]
    fn secrets_are_found_among_other_bytes() {
        let secret = "0123456789abcdef0123456789abcdef";
        let bytes = [&b"\0xyz"[..], secret.as_bytes(), b"\xff0123 abc", secret.as_bytes()].concat();
        assert_eq!(secrets_in(&bytes), format!("{secret}\nabc{secret}\n").into_bytes());
    }
}
