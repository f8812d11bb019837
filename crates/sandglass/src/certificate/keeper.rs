//! `sandglass keep-certificate`: has the certificate of a server that can't look after it itself.
//!
//! The server starts it before it gives up its privilege, tells it the task on its standard input, and hears of each certificate on
//! its standard output. It reads nothing that came over a network: with an authority speaks a process without privilege (see
//! [`super::acme`]), and what that brings is kept only if it goes with the key. It ends when nobody listens any more.

use std::fs::Permissions;
use std::io::{Write as _, stdout};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use fs_err as fs;
use jiff::Timestamp;
use rcgen::{CertificateParams, DistinguishedName, KeyPair};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sandglass_api::Certificate;
use serde::{Deserialize, Serialize};

use super::acme::{self, User};
use super::feed::Said;
use super::{contents, name_of, parse, replace};
use crate::config::tls::Acme;

/// How often files are looked at.
const LOOK: Duration = Duration::from_secs(3);

/// How often the clock is looked at, which may be set. A certificate may last for less than a minute.
const TICK: Duration = Duration::from_secs(1);

/// The wait after an authority gave none. Well-known ones allow five failures an hour (Let's Encrypt, "Rate limits").
const AGAIN: Duration = Duration::from_secs(3600);

/// What is kept, and for which domain.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Task {
    /// It may carry a port.
    pub(super) domain: String,
    pub(super) kept: Kept,
}

/// Where it comes from.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Kept {
    /// Files that somebody else replaces.
    Files { certificate: PathBuf, key: PathBuf },
    /// An authority; what it gave is kept in this folder. Who speaks with it is this user.
    Acme { acme: Acme, folder: PathBuf, user: Option<User> },
}

/// Keeps it until nobody listens any more.
pub(crate) fn run() -> anyhow::Result<()> {
    let task: Task = serde_json::from_reader(std::io::stdin().lock())?;
    let first = match &task.kept {
        Kept::Files { certificate, key } => keep_files(&task.domain, [certificate, key]),
        Kept::Acme { acme, folder, user } => {
            keep_ordered(&Ordered { domain: &task.domain, acme, folder, user: *user })
        }
    };
    // Only the first one may fail: afterwards there is one that still works.
    if let Err(error) = first {
        say(&Said::Failed(format!("{error:#}")))?;
    }
    Ok(())
}

fn say(said: &Said) -> anyhow::Result<()> {
    let mut out = stdout().lock();
    serde_json::to_writer(&mut out, said)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}

/// Waits for something to read, for so long at most. `None` once nobody listens to this process any more.
pub(super) fn wait(reading: Option<BorrowedFd<'_>>, time: Duration) -> std::io::Result<Option<bool>> {
    let out = stdout();
    // Without any flag it still tells when the other end is gone.
    let mut polled = vec![PollFd::from_borrowed_fd(out.as_fd(), PollFlags::empty())];
    polled.extend(reading.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
    let time = Timespec::try_from(time).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
    match poll(&mut polled, Some(&time)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    if !polled[0].revents().is_empty() {
        return Ok(None);
    }
    Ok(Some(polled.get(1).is_some_and(|fd| !fd.revents().is_empty())))
}

fn keep_files(domain: &str, paths: [&Path; 2]) -> anyhow::Result<()> {
    let read = || -> anyhow::Result<[String; 2]> {
        let [chain, key] = paths.map(|path| Ok::<_, anyhow::Error>(String::from_utf8(contents(path)?)?));
        Ok([chain?, key?])
    };
    let said = |[chain, key]: [String; 2]| -> anyhow::Result<Said> {
        usable(&chain, &key, domain).with_context(|| {
            format!("the certificate {} with the key {}", paths[0].display(), paths[1].display())
        })?;
        Ok(Said::Certificate { chain, key })
    };
    let first = read()?;
    say(&said(first.clone())?)?;
    // From here on there is one that works, so nothing that can't be used ends this.
    let (mut seen, mut told) = (first, None);
    while wait(None, LOOK)?.is_some() {
        let outcome = match read() {
            Ok(now) if now == seen => continue,
            Ok(now) => {
                seen.clone_from(&now);
                said(now)
            }
            Err(error) => Err(error),
        };
        match outcome {
            Ok(said) => {
                told = None;
                say(&said)?;
            }
            // Once for each reason.
            Err(error) => {
                let why = format!("{error:#}");
                if told.as_ref() != Some(&why) {
                    tracing::error!("what is in place of the certificate can't be used: {why}");
                    told = Some(why);
                }
            }
        }
    }
    Ok(())
}

/// A certificate for a domain that goes with its key and has not expired.
fn usable(chain: &str, key: &str, domain: &str) -> anyhow::Result<Certificate> {
    let certificate = parse(chain.as_bytes(), key.as_bytes(), domain)?;
    if certificate.expires() <= Timestamp::now() {
        bail!("it expired on {}", certificate.expires());
    }
    Ok(certificate)
}

/// A certificate of an authority's, kept in one file with its key.
struct Ordered<'a> {
    domain: &'a str,
    acme: &'a Acme,
    folder: &'a Path,
    user: Option<User>,
}

impl Ordered<'_> {
    fn file(&self) -> PathBuf {
        self.folder.join("certificate.pem")
    }

    fn account(&self) -> PathBuf {
        self.folder.join("account.json")
    }

    /// There since the authority last gave none.
    fn failed(&self) -> PathBuf {
        self.folder.join("failed")
    }

    /// The last one of this authority, if it can be used.
    fn last(&self) -> Option<(Certificate, String)> {
        if !acme::is_of(&self.account(), &self.acme.directory) {
            return None;
        }
        let text = String::from_utf8(contents(&self.file()).ok()?).ok()?;
        Some((usable(&text, &text, self.domain).ok()?, text))
    }

    /// Whether the authority gave none a short while ago. A clock that was set back makes nobody wait.
    fn rests(&self) -> bool {
        let failed = fs::metadata(self.failed()).and_then(|failed| failed.modified());
        failed.is_ok_and(|at| at.elapsed().is_ok_and(|since| since < AGAIN))
    }

    /// Gets another one. `None` once nobody listens any more.
    fn order(&self) -> anyhow::Result<Option<(Certificate, String)>> {
        fs::create_dir_all(self.folder)?;
        for folder in self.folder.ancestors().take(3) {
            fs::set_permissions(folder, Permissions::from_mode(0o755))?;
        }
        let ordered = self.try_to_order();
        match &ordered {
            Err(_) => replace(&self.failed(), b"", 0o600)?,
            Ok(_) if self.failed().try_exists()? => fs::remove_file(self.failed())?,
            Ok(_) => {}
        }
        ordered
    }

    fn try_to_order(&self) -> anyhow::Result<Option<(Certificate, String)>> {
        let name = name_of(self.domain);
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new([name.clone(), format!("*.{name}")])?;
        params.distinguished_name = DistinguishedName::new();
        let request = params.serialize_request(&key)?;
        let order = acme::Order { acme: self.acme, name, request: request.der().to_vec() };
        let Some(chain) = order.place(&self.account(), self.user)? else { return Ok(None) };
        let text = format!("{chain}\n{}", key.serialize_pem());
        let certificate = usable(&text, &text, self.domain)?;
        replace(&self.file(), text.as_bytes(), 0o600)?;
        Ok(Some((certificate, text)))
    }
}

fn keep_ordered(ordered: &Ordered<'_>) -> anyhow::Result<()> {
    let mut current = match ordered.last() {
        Some(last) => last,
        None => match ordered.order()? {
            Some(first) => first,
            None => return Ok(()),
        },
    };
    loop {
        let (certificate, text) = current;
        say(&Said::Certificate { chain: text.clone(), key: text })?;
        current = loop {
            if !sleep_until(|| due(&certificate) <= Timestamp::now() && !ordered.rests())? {
                return Ok(());
            }
            match ordered.order() {
                Ok(Some(next)) => break next,
                Ok(None) => return Ok(()),
                Err(error) => {
                    let expires = certificate.expires();
                    tracing::error!(%expires, "the certificate could not be renewed, and this is tried again: {error:#}");
                }
            }
        };
    }
}

/// Waits; `false` once nobody listens any more.
fn sleep_until(over: impl Fn() -> bool) -> std::io::Result<bool> {
    while !over() {
        if wait(None, TICK)?.is_none() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// When to get another one: when two thirds of its time are over.
fn due(certificate: &Certificate) -> Timestamp {
    let (begins, expires) = (certificate.begins().as_second(), certificate.expires().as_second());
    let due = begins.saturating_add(expires.saturating_sub(begins) / 3 * 2);
    Timestamp::from_second(due).unwrap_or(Timestamp::MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_due_after_two_thirds_of_its_time() {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(["boxes.test".into(), "*.boxes.test".into()]).unwrap();
        let now = std::time::SystemTime::now();
        params.not_before = now.into();
        params.not_after = (now + Duration::from_secs(90 * 24 * 3600)).into();
        let text = params.self_signed(&key).unwrap().pem() + &key.serialize_pem();
        let certificate = parse(text.as_bytes(), text.as_bytes(), "boxes.test:443").unwrap();
        let left = certificate.expires().as_second() - due(&certificate).as_second();
        assert_eq!(left, 30 * 24 * 3600);
    }
}
