//! Root, the kernel and the clock.

use std::ops::RangeInclusive;
use std::time::SystemTime;

use sandglass_linux::{clock, privilege};

use super::check::Check;
use crate::startup::Reason;

/// The oldest kernel whose interfaces are relied on: Debian 12's series is 6.1, and Landlock came with 5.13.
const OLDEST: Release = (5, 13, 0);

/// The first and the last in which a group whose processes wake each other without pause can hold the processors for seconds
/// (commit 6d71a9c61604, taken back by 101f3498b4bd; seen on the last). Earlier series may have got the one without the other.
const STALLING: RangeInclusive<Release> = (6, 13, 0)..=(6, 18, 44);

/// As in `6.18.44`.
type Release = (u32, u32, u32);

/// What was found.
#[derive(Debug)]
pub(super) struct Facts {
    root: bool,
    release: String,
    /// The version of Landlock's interface; `None` if it is not in the kernel or switched off.
    landlock: Option<u32>,
    /// Whether something sets the clock; `None` if the kernel does not say.
    synchronised: Option<bool>,
    now: SystemTime,
    /// When this program was written to the disk: it can't be earlier.
    installed: Option<SystemTime>,
    rcu_expedited: bool,
}

pub(super) fn look() -> Facts {
    let installed = std::env::current_exe().and_then(std::fs::metadata).and_then(|meta| meta.modified());
    Facts {
        root: rustix::process::geteuid().is_root(),
        release: rustix::system::uname().release().to_string_lossy().into_owned(),
        landlock: privilege::landlock_abi(),
        synchronised: clock::is_synchronised().ok(),
        now: SystemTime::now(),
        installed: installed.ok(),
        rcu_expedited: std::fs::read_to_string("/sys/kernel/rcu_expedited")
            .is_ok_and(|text| text.trim() != "0"),
    }
}

pub(super) fn judge(facts: &Facts) -> Vec<Check> {
    let root = if facts.root {
        Check::good("root", "yes")
    } else {
        Check::bad("root", Reason::NotRoot, "sandboxes need root to be made")
            .with_remedy("run this, and `serve`, as root")
    };
    vec![root, kernel(&facts.release), landlock(facts.landlock), rcu(facts.rcu_expedited), clock(facts)]
}

fn kernel(release: &str) -> Check {
    let mut parts = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
    let mut part = || parts.next().unwrap_or(0);
    let version: Release = (part(), part(), part());
    if STALLING.contains(&version) {
        return Check::note(
            "kernel",
            format!("{release} can stand still for a moment while a sandbox has many busy threads"),
        )
        .with_remedy("use 6.18.45 or newer, or a series up to 6.11");
    }
    if version >= OLDEST {
        return Check::good("kernel", release);
    }
    let found = format!("{release} is too old");
    Check::bad("kernel", Reason::NoLandlock, found)
        .with_remedy(format!("use {}.{} or newer", OLDEST.0, OLDEST.1))
}

fn landlock(abi: Option<u32>) -> Check {
    const NAME: &str = "Landlock";
    match abi {
        None => Check::bad(NAME, Reason::NoLandlock, "not there, or switched off"),
        Some(abi @ 6..) => Check::good(NAME, format!("interface {abi}")),
        Some(abi) => Check::note(
            NAME,
            format!("interface {abi}: paths are confined; TCP ports, devices, signals or abstract sockets are not all"),
        )
        .with_remedy("Linux 6.12 has interface 6"),
    }
}

/// Starting a sandbox waits for the kernel's grace periods several times.
fn rcu(expedited: bool) -> Check {
    const NAME: &str = "RCU grace periods";
    if expedited {
        return Check::good(NAME, "expedited");
    }
    Check::note(NAME, "of the usual length: starts of sandboxes wait some milliseconds for each")
        .with_remedy("`echo 1 > /sys/kernel/rcu_expedited` shortens them, at some cost for all else")
}

fn clock(facts: &Facts) -> Check {
    const NAME: &str = "clock";
    let set = "set it, and keep it set by systemd-timesyncd or chrony";
    if facts.installed.is_some_and(|installed| facts.now < installed) {
        return Check::note(NAME, "it is before the time at which this program was installed")
            .with_remedy(set);
    }
    match facts.synchronised {
        Some(true) => Check::good(NAME, "synchronised"),
        Some(false) => Check::note(NAME, "nothing keeps it synchronised").with_remedy(set),
        None => Check::note(NAME, "the kernel does not say whether it is synchronised"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::check::Verdict::{Bad, Good, Note};
    use super::*;

    fn good() -> Facts {
        Facts {
            root: true,
            release: "6.1.0-18-amd64".into(),
            landlock: Some(6),
            synchronised: Some(true),
            now: SystemTime::UNIX_EPOCH + Duration::from_secs(100),
            installed: Some(SystemTime::UNIX_EPOCH),
            rcu_expedited: true,
        }
    }

    #[test]
    fn every_fact_is_judged() {
        let all_good = judge(&good());
        assert!(all_good.iter().all(|check| check.verdict() == Good), "{all_good:?}");
        let cases = [
            ("root", Bad, Facts { root: false, ..good() }),
            ("kernel", Bad, Facts { release: "5.10.0-28-amd64".into(), ..good() }),
            ("kernel", Bad, Facts { release: "4.19".into(), ..good() }),
            ("kernel", Note, Facts { release: "6.13-rc7".into(), ..good() }),
            ("kernel", Note, Facts { release: "6.18.44-generic".into(), ..good() }),
            ("kernel", Bad, Facts { release: String::new(), ..good() }),
            ("Landlock", Bad, Facts { landlock: None, ..good() }),
            ("Landlock", Note, Facts { landlock: Some(2), ..good() }),
            ("RCU grace periods", Note, Facts { rcu_expedited: false, ..good() }),
            ("clock", Note, Facts { synchronised: Some(false), ..good() }),
            ("clock", Note, Facts { synchronised: None, ..good() }),
            ("clock", Note, Facts { now: SystemTime::UNIX_EPOCH - Duration::from_secs(1), ..good() }),
        ];
        for (name, verdict, facts) in cases {
            let checks = judge(&facts);
            let odd: Vec<_> = checks.iter().filter(|check| check.verdict() != Good).collect();
            assert_eq!(odd.len(), 1, "{facts:?}");
            assert_eq!((odd[0].name(), odd[0].verdict()), (name, verdict), "{facts:?}");
        }
    }

    #[test]
    fn newer_kernels_are_good() {
        for release in ["5.13.0", "6.12.90", "6.18.45", "10.0-rc1"] {
            assert_eq!(kernel(release).verdict(), Good, "{release}");
        }
    }
}
