//! Users and groups, read from `/etc/passwd` and `/etc/group`.
//!
//! The C library's look-ups would load name service plug-ins of the guest's image into the agent, so they must
//! not even be linked.

use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use crate::exec::Identity;

/// Upper bound for either file, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// The kernel takes more, but no login has them.
const MAX_GROUPS: usize = 256;

/// One line of `/etc/passwd`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    /// Login name.
    pub name: String,
    /// Home directory; absolute.
    pub home: String,
    /// Login shell.
    pub shell: String,
    /// Ids, the supplementary groups included.
    pub identity: Identity,
}

/// The two files as they were when read.
#[derive(Debug, Default)]
pub(crate) struct Users {
    passwd: String,
    group: String,
}

struct Passwd<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
    shell: &'a str,
}

struct Group<'a> {
    name: &'a str,
    gid: u32,
    members: &'a str,
}

fn parse_passwd(line: &str) -> Option<Passwd<'_>> {
    let mut fields = line.split(':');
    let name = fields.next().filter(|name| !name.is_empty() && !name.starts_with('#'))?;
    let (_password, uid, gid, _gecos) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    let home = fields.next().filter(|home| home.starts_with('/')).unwrap_or("/");
    let shell = fields.next().filter(|shell| !shell.is_empty()).unwrap_or("/bin/sh");
    Some(Passwd { name, uid: uid.parse().ok()?, gid: gid.parse().ok()?, home, shell })
}

fn parse_group(line: &str) -> Option<Group<'_>> {
    let mut fields = line.split(':');
    let name = fields.next().filter(|name| !name.is_empty() && !name.starts_with('#'))?;
    let (_password, gid) = (fields.next()?, fields.next()?);
    Some(Group { name, gid: gid.parse().ok()?, members: fields.next().unwrap_or("") })
}

/// Reads a regular file up to a bound; a missing one counts as empty.
fn read_bounded(path: &Path) -> io::Result<String> {
    // O_NONBLOCK: whoever is root inside may have put a FIFO there.
    let open = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path);
    let file = match open {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(String::new()),
        other => other?,
    };
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

impl User {
    /// Whoever this process runs as, with the home directory `home`.
    ///
    /// # Errors
    /// As [`Users::read`], or the kernel does not tell the groups.
    pub(crate) fn own(home: &str) -> io::Result<Self> {
        let uid = rustix::process::geteuid().as_raw();
        let groups = rustix::process::getgroups()?.into_iter().map(rustix::fs::Gid::as_raw).collect();
        let identity = Identity { uid, gid: rustix::process::getegid().as_raw(), groups };
        let known = Users::read(Path::new("/"))?.by_uid(uid);
        let (name, shell) = match known {
            Some(user) => (user.name, user.shell),
            None => (uid.to_string(), "/bin/sh".into()),
        };
        Ok(Self { name, home: home.into(), shell, identity })
    }
}

impl Users {
    /// Reads both files below `root`.
    ///
    /// # Errors
    /// A file exists but could not be read.
    pub(crate) fn read(root: &Path) -> io::Result<Self> {
        Ok(Self {
            passwd: read_bounded(&root.join("etc/passwd"))?,
            group: read_bounded(&root.join("etc/group"))?,
        })
    }

    #[cfg(test)]
    pub(crate) fn from_texts(passwd: &str, group: &str) -> Self {
        Self { passwd: passwd.into(), group: group.into() }
    }

    fn user(&self, wanted: impl Fn(&Passwd<'_>) -> bool) -> Option<User> {
        let entry = self.passwd.lines().filter_map(parse_passwd).find(wanted)?;
        let mut groups = vec![entry.gid];
        for group in self.group.lines().filter_map(parse_group) {
            if groups.len() < MAX_GROUPS
                && !groups.contains(&group.gid)
                && group.members.split(',').any(|member| member == entry.name)
            {
                groups.push(group.gid);
            }
        }
        Some(User {
            name: entry.name.into(),
            home: entry.home.into(),
            shell: entry.shell.into(),
            identity: Identity { uid: entry.uid, gid: entry.gid, groups },
        })
    }

    /// The user with this login name.
    pub(crate) fn by_name(&self, name: &str) -> Option<User> {
        self.user(|entry| entry.name == name)
    }

    /// The first user with this id.
    pub(crate) fn by_uid(&self, uid: u32) -> Option<User> {
        self.user(|entry| entry.uid == uid)
    }

    /// Login name of a user id, or the number.
    pub(crate) fn user_name(&self, uid: u32) -> String {
        let name = self.passwd.lines().filter_map(parse_passwd).find(|entry| entry.uid == uid);
        name.map_or_else(|| uid.to_string(), |entry| entry.name.into())
    }

    /// Name of a group id, or the number.
    pub(crate) fn group_name(&self, gid: u32) -> String {
        let name = self.group.lines().filter_map(parse_group).find(|group| group.gid == gid);
        name.map_or_else(|| gid.to_string(), |group| group.name.into())
    }

    /// The id of the group with this name.
    pub(crate) fn gid(&self, name: &str) -> Option<u32> {
        self.group.lines().filter_map(parse_group).find(|group| group.name == name).map(|group| group.gid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample() -> Users {
        Users::from_texts(
            "root:x:0:0:root:/root:/bin/bash\n# comment\nbroken\nuser:x:1000:1000::/home/user:/bin/bash\n\
             odd:x:7:7::relative:\nlarge:x:99999999999:1::/:/\n",
            "root:x:0:\nsudo:x:27:other,user\nuser:x:1000:\nempty:x:5:\n",
        )
    }

    #[test]
    fn finds_users_with_all_their_groups() {
        let user = sample().by_name("user").unwrap();
        assert_eq!(user.identity, Identity { uid: 1000, gid: 1000, groups: vec![1000, 27] });
        assert_eq!((user.home.as_str(), user.shell.as_str()), ("/home/user", "/bin/bash"));
        assert_eq!(sample().by_uid(0).unwrap().name, "root");
    }

    #[test]
    fn odd_lines_are_skipped_or_made_safe() {
        let users = sample();
        assert_eq!(users.by_name("broken"), None);
        assert_eq!(users.by_name("large"), None);
        assert_eq!(users.by_name(""), None);
        let odd = users.by_name("odd").unwrap();
        assert_eq!((odd.home.as_str(), odd.shell.as_str()), ("/", "/bin/sh"));
    }

    #[test]
    fn names_fall_back_to_numbers() {
        let users = sample();
        assert_eq!((users.user_name(1000), users.user_name(5)), ("user".into(), "5".into()));
        assert_eq!((users.group_name(27), users.group_name(9)), ("sudo".into(), "9".into()));
        assert_eq!((users.gid("sudo"), users.gid("nobody")), (Some(27), None));
    }

    #[test]
    fn a_fifo_in_place_of_the_file_does_not_block() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("etc")).unwrap();
        let fifo = root.path().join("etc/passwd");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0)
            .unwrap();
        assert!(Users::read(root.path()).is_err());
    }

    proptest! {
        #[test]
        fn any_text_parses_without_panic(passwd: String, group: String, name: String, uid: u32) {
            let users = Users::from_texts(&passwd, &group);
            let _ = (users.by_name(&name), users.by_uid(uid), users.group_name(uid));
        }
    }
}
