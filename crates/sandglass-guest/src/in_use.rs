//! What programs have of volumes: an image of the sandbox's memory relies on it, and other sandboxes may change it.
//!
//! What comes back from an image opens its files again by their paths. So whatever a program has must be what is at its path:
//! that is seen from inside, by the numbers of the files, because looking at a path makes the engine ask the file system
//! outside. Whether it stays so until then is looked at from outside. A look that is not complete is none.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, Metadata};
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Instant;

use sandglass_proto::control::{FromAgent, Holder, MAX_IN_USE, MAX_IN_USE_LEN, Uncounted};

use crate::deleted::{
    Devices, LOOK_TIME, MAX_HOLDERS, MAX_MAPS, Mapped, OUTSIDE, devices_of, mapped_file, shortened,
};

/// Paths that file systems from outside have in every sandbox.
const OWN: [&str; 2] = ["/", "/tmp"];

/// The volumes of a sandbox.
#[derive(Debug, Default, PartialEq, Eq)]
struct Volumes {
    devices: Devices,
    /// Where they are.
    paths: BTreeSet<String>,
}

impl Volumes {
    /// File systems from outside that are neither the root nor the sandbox's own `/tmp`, of the text of
    /// `/proc/self/mountinfo` (proc_pid_mountinfo(5)).
    fn of(mountinfo: &str) -> Self {
        let path = |line: &str| line.split(' ').nth(4).map(str::to_owned);
        let is_own = |line: &str| path(line).is_none_or(|path| OWN.contains(&path.as_str()));
        let (own, others): (Vec<_>, Vec<_>) = mountinfo.lines().partition(|line| is_own(line));
        let own = devices_of(&own.join("\n"), OUTSIDE);
        let mut volumes = Self::default();
        for line in others {
            let here: Devices = &devices_of(line, OUTSIDE) - &own;
            if !here.is_empty() {
                volumes.devices.extend(here);
                volumes.paths.extend(path(line));
            }
        }
        volumes
    }

    fn have(&self, file: &Metadata) -> bool {
        self.devices.contains(&(rustix::fs::major(file.dev()), rustix::fs::minor(file.dev())))
    }

    fn are_above(&self, path: &Path) -> bool {
        self.paths.iter().any(|volume| path.starts_with(volume))
    }

    fn now() -> Self {
        Self::of(&std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default())
    }
}

/// What a program has.
#[derive(Debug, PartialEq, Eq)]
enum Has {
    /// What is at this path.
    There(String),
    /// Something that had this path, and is not there.
    Displaced(String),
}

/// Whether the sandbox has volumes.
pub(crate) fn has_volumes() -> bool {
    !Volumes::now().devices.is_empty()
}

/// The files and folders that programs have on volumes, of all processes but this one. Blocks.
///
/// # Errors
/// What to answer: [`FromAgent::Displaced`], or [`FromAgent::Uncounted`] unless all was looked at.
pub(crate) fn on_volumes() -> Result<Vec<Holder>, FromAgent> {
    let mut look = Look { volumes: Volumes::now(), until: Instant::now() + LOOK_TIME, ..Look::default() };
    let own = std::process::id().to_string();
    for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid = process.file_name().to_str().filter(|name| *name != own).and_then(|name| name.parse().ok());
        if let Some(pid) = pid {
            look.at(pid, &process.path()).map_err(|why| FromAgent::Uncounted { why })?;
        }
    }
    look.result()
}

/// A look at all programs.
#[derive(Debug)]
struct Look {
    volumes: Volumes,
    until: Instant,
    /// By their paths.
    found: BTreeMap<String, Holder>,
    /// Bytes of them as they are encoded.
    len: usize,
    displaced: Vec<Holder>,
}

impl Default for Look {
    fn default() -> Self {
        Self {
            volumes: Volumes::default(),
            until: Instant::now(),
            found: BTreeMap::new(),
            len: 0,
            displaced: Vec::new(),
        }
    }
}

impl Look {
    fn at(&mut self, pid: u32, process: &Path) -> Result<(), Uncounted> {
        let files = std::fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
        let links = ["cwd", "root", "exe"].map(|link| process.join(link)).into_iter();
        for link in links.chain(files.map(|file| file.path())) {
            let has = at_link(&link, &self.volumes);
            self.note(pid, process, has)?;
        }
        let mut maps = Vec::new();
        // A process that ends has nothing.
        let _ = File::open(process.join("maps")).and_then(|file| file.take(MAX_MAPS).read_to_end(&mut maps));
        if u64::try_from(maps.len()).map_or(true, |len| len >= MAX_MAPS) {
            return Err(Uncounted::TooMany);
        }
        let maps = String::from_utf8_lossy(&maps);
        for mapped in maps.lines().filter_map(mapped_file) {
            let has = self.volumes.devices.contains(&mapped.device).then(|| at_map(&mapped));
            self.note(pid, process, has)?;
        }
        Ok(())
    }

    fn note(&mut self, pid: u32, process: &Path, has: Option<Has>) -> Result<(), Uncounted> {
        if Instant::now() > self.until {
            return Err(Uncounted::TooLong);
        }
        let program = || {
            let program = std::fs::read_to_string(process.join("comm")).unwrap_or_default();
            shortened(program.trim_end())
        };
        match has {
            None => Ok(()),
            Some(Has::Displaced(file)) => {
                if self.displaced.len() < MAX_HOLDERS {
                    self.displaced.push(Holder { pid, program: program(), file: shortened(&file) });
                }
                Ok(())
            }
            Some(Has::There(file)) if self.found.contains_key(&file) => Ok(()),
            Some(Has::There(file)) => self.add(Holder { pid, program: program(), file }),
        }
    }

    fn add(&mut self, holder: Holder) -> Result<(), Uncounted> {
        let encoded = serde_json::to_string(&holder).map_err(|_| Uncounted::TooMany)?;
        // With the comma after it.
        self.len += encoded.len() + 1;
        if self.found.len() == MAX_IN_USE || self.len > MAX_IN_USE_LEN {
            return Err(Uncounted::TooMany);
        }
        self.found.insert(holder.file.clone(), holder);
        Ok(())
    }

    fn result(self) -> Result<Vec<Holder>, FromAgent> {
        if self.displaced.is_empty() {
            Ok(self.found.into_values().collect())
        } else {
            Err(FromAgent::Displaced { holders: self.displaced })
        }
    }
}

/// What a link of `/proc` leads to, if that is on a volume.
fn at_link(link: &Path, volumes: &Volumes) -> Option<Has> {
    let file = std::fs::metadata(link);
    // Who has ended has nothing.
    let path = std::fs::read_link(link).ok()?;
    let displaced = || Some(Has::Displaced(path.to_string_lossy().into_owned()));
    match file {
        Ok(file) if volumes.have(&file) => {
            let there = std::fs::symlink_metadata(&path);
            let is_same = there.is_ok_and(|there| {
                (there.dev(), there.ino(), there.file_type()) == (file.dev(), file.ino(), file.file_type())
            });
            // What has no name that is text can't be told to anybody who could look.
            path.to_str().filter(|_| is_same).map_or_else(displaced, |path| Some(Has::There(path.to_owned())))
        }
        Ok(_) => None,
        // It may be so because of what others did to it.
        Err(_) if volumes.are_above(&path) => displaced(),
        Err(_) => None,
    }
}

/// What a process has mapped of a volume.
fn at_map(mapped: &Mapped<'_>) -> Has {
    let name = mapped.name.to_owned();
    let there = std::fs::symlink_metadata(&name);
    let is_same = there.is_ok_and(|there| {
        (rustix::fs::major(there.dev()), rustix::fs::minor(there.dev())) == mapped.device
            && there.ino() == mapped.inode
    });
    if is_same { Has::There(name) } else { Has::Displaced(name) }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn volumes_are_what_is_from_outside_and_not_the_sandbox_s_own() {
        let text = "1 0 0:17 / / rw - 9p none rw\n2 1 0:20 / /tmp rw - 9p none rw\n\
                    3 1 0:24 / /dev/shm rw - tmpfs none rw\n4 1 0:25 / /mnt/v rw - 9p none rw\n\
                    5 1 0:17 /usr /bound rw - 9p none rw\n";
        let paths = BTreeSet::from(["/mnt/v".to_owned()]);
        assert_eq!(Volumes::of(text), Volumes { devices: Devices::from([(0, 25)]), paths });
        assert_eq!(
            mapped_file("1-2 rw-s 00000000 00:19 484  /mnt/v/f"),
            Some(Mapped { device: (0, 25), inode: 484, name: "/mnt/v/f" })
        );
    }

    #[test]
    fn what_is_not_at_its_path_is_displaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        let file = File::create(&path).unwrap();
        let device = file.metadata().unwrap().dev();
        let volumes = Volumes {
            devices: Devices::from([(rustix::fs::major(device), rustix::fs::minor(device))]),
            paths: BTreeSet::from([folder.path().to_str().unwrap().to_owned()]),
        };
        let link = Path::new("/proc/self/fd").join(std::os::fd::AsRawFd::as_raw_fd(&file).to_string());
        let text = path.to_str().unwrap().to_owned();
        assert_eq!(at_link(&link, &volumes), Some(Has::There(text)));
        assert_eq!(at_link(&link, &Volumes::default()), None);
        std::fs::rename(&path, folder.path().join("g")).unwrap();
        File::create(&path).unwrap();
        std::fs::remove_file(folder.path().join("g")).unwrap();
        assert!(matches!(at_link(&link, &volumes), Some(Has::Displaced(_))));
    }

    #[test]
    fn what_is_too_much_or_takes_too_long_is_not_left_out() {
        let new = || Look { until: Instant::now() + Duration::from_secs(60), ..Look::default() };
        let there = |name: String| Some(Has::There(name));
        let mut look = new();
        for number in 0..MAX_IN_USE {
            assert_eq!(look.note(1, Path::new("/none"), there(format!("/v/{number}"))), Ok(()));
        }
        assert_eq!(look.note(2, Path::new("/none"), there("/v/0".into())), Ok(()));
        assert_eq!(look.note(1, Path::new("/none"), there("/v/x".into())), Err(Uncounted::TooMany));
        assert_eq!(look.result().unwrap().len(), MAX_IN_USE);

        let (mut look, long) = (new(), "\u{1}".repeat(4000));
        let noted = (0..10).try_for_each(|n| look.note(1, Path::new("/none"), there(format!("/{n}{long}"))));
        assert_eq!(noted, Err(Uncounted::TooMany));
        let whole = FromAgent::FrozenWith { in_use: look.result().unwrap() };
        assert!(serde_json::to_vec(&whole).unwrap().len() <= sandglass_proto::control::MAX_CONTROL_LEN);

        let mut look = Look { until: Instant::now(), ..Look::default() };
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!(look.note(1, Path::new("/none"), None), Err(Uncounted::TooLong));
    }
}
