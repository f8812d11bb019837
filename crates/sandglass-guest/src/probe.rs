//! The attacks of `sandglass verify`, carried out from inside: `guest probe NAME ARGUMENT…`. What one says is for a
//! person; a witness outside judges.
//!
//! An attack tries every way that it knows and prints what it got; one that is told to hold on to something prints `ready`
//! when it did, and waits to be ended.

mod canary;
mod egress;
mod isolation;

use std::io::{self, Write as _};
use std::process::ExitCode;

pub(crate) use canary::main as canary;

/// An attack, given its arguments.
type Attack = fn(&[String]) -> io::Result<()>;

/// All of them by name.
fn attack(name: &str) -> Option<Attack> {
    [isolation::ATTACKS, egress::ATTACKS]
        .into_iter()
        .flatten()
        .find(|(known, _)| *known == name)
        .map(|(_, attack)| *attack)
}

/// Carries one out.
pub(crate) fn main(mut args: impl Iterator<Item = String>) -> ExitCode {
    let name = args.next().unwrap_or_default();
    let args: Vec<String> = args.collect();
    let Some(attack) = attack(&name) else {
        eprintln!("no probe {name:?}");
        return ExitCode::from(2);
    };
    match attack(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
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

/// The argument of a place.
fn argument(args: &[String], index: usize) -> io::Result<&str> {
    args.get(index)
        .map(String::as_str)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "an argument lacks"))
}

/// The argument of a place as a number.
fn number<T: std::str::FromStr>(args: &[String], index: usize) -> io::Result<T> {
    argument(args, index)?.parse().map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "no number"))
}

/// Says that something is held, and holds it until somebody ends this process.
fn hold(held: impl Sized) -> io::Result<()> {
    tell(b"ready")?;
    // Longer than any probe takes, and not for ever.
    std::thread::sleep(std::time::Duration::from_secs(120));
    drop(held);
    Ok(())
}
