use std::collections::BTreeSet;
use std::time::Duration;

use super::*;

/// A cache folder, and instances that share it.
struct Estate(tempfile::TempDir);

impl Estate {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn cache(&self) -> PathBuf {
        self.0.path().join("cache")
    }

    fn data(&self, instance: &InstanceId) -> PathBuf {
        self.0.path().join(instance.as_str())
    }

    fn instance(&self) -> (InstanceId, Pins) {
        let instance = InstanceId::random();
        std::fs::create_dir(self.data(&instance)).unwrap();
        let pins = self.open(&instance);
        (instance, pins)
    }

    fn open(&self, instance: &InstanceId) -> Pins {
        Pins::open(&self.cache(), &self.data(instance), instance).unwrap()
    }

    fn make(&self, entry: Entry) {
        let path = entry.path(&self.cache());
        std::fs::create_dir_all(path.join("bin")).unwrap();
        std::fs::write(path.join("bin/sh"), "x").unwrap();
    }

    /// What of these is gone now.
    fn swept<const N: usize>(&self, entries: [Entry; N]) -> [bool; N] {
        let removed = sweep(&self.cache(), Duration::ZERO).unwrap();
        for folder in ["agents", "rootfs"] {
            for name in std::fs::read_dir(self.cache().join(folder)).into_iter().flatten() {
                let name = name.unwrap().file_name().into_string().unwrap();
                assert!(!name.starts_with('.'), "{name} is left");
            }
        }
        entries.map(|entry| {
            let gone = !entry.path(&self.cache()).exists();
            assert!(gone || !removed.contains(&entry), "{entry}");
            gone
        })
    }
}

fn digest(byte: u8) -> Digest {
    Digest::from_bytes([byte; 32])
}

#[test]
fn names_of_pins_are_those_of_entries_and_no_others() {
    for entry in [Entry::Agent(digest(1)), Entry::Rootfs(digest(0xab))] {
        assert_eq!(entry.to_string().parse(), Ok(entry));
    }
    let hex = digest(1).to_string();
    for name in [String::new(), "home".into(), hex.clone(), format!("disks-{hex}"), format!("agents-{hex}0")]
    {
        assert_eq!(name.parse::<Entry>(), Err(NotAnEntry), "{name}");
    }
}

#[test]
fn what_any_instance_needs_stays_and_the_rest_goes() {
    let estate = Estate::new();
    let all = [
        Entry::Agent(digest(1)),
        Entry::Agent(digest(2)),
        Entry::Rootfs(digest(1)),
        Entry::Rootfs(digest(2)),
        Entry::Rootfs(digest(3)),
    ];
    all.iter().for_each(|entry| estate.make(*entry));
    let (one, two) = (estate.instance().1, estate.instance().1);
    drop(one.hold([all[0], all[2]]).unwrap());
    drop(two.hold([all[2], all[3]]).unwrap());
    assert_eq!(estate.swept(all), [false, true, false, false, true]);
    // A need ends when the last has none, and that is known only once its owner has looked.
    one.begin();
    one.settle(&BTreeSet::new()).unwrap();
    assert_eq!(estate.swept(all), [true, true, false, false, true]);
    two.begin();
    two.settle(&BTreeSet::from([all[3]])).unwrap();
    assert_eq!(estate.swept(all), [true, true, true, false, true]);
    // What nobody knows stays.
    std::fs::create_dir(estate.cache().join("rootfs/mine")).unwrap();
    estate.swept(all);
    assert!(estate.cache().join("rootfs/mine").exists());
}

#[test]
fn what_verbs_use_stays_whatever_was_seen_of_it() {
    let estate = Estate::new();
    let all = [1, 2, 3].map(digest).map(Entry::Rootfs);
    all.iter().for_each(|entry| estate.make(*entry));
    let (_, pins) = estate.instance();
    let held = pins.hold([all[0]]).unwrap();
    pins.begin();
    // It came and went between the beginning and the end of the look.
    drop(pins.hold([all[1]]).unwrap());
    drop(held);
    pins.settle(&BTreeSet::new()).unwrap();
    assert_eq!(estate.swept(all), [false, false, true]);
    // At the next look nobody has used them.
    pins.begin();
    let twice = [pins.hold([all[1]]).unwrap(), pins.hold([all[1]]).unwrap()];
    drop(twice);
    pins.begin();
    pins.settle(&BTreeSet::new()).unwrap();
    assert_eq!(estate.swept(all), [true; 3]);
}

#[test]
fn a_stopped_instance_counts_and_one_that_is_gone_does_not() {
    let estate = Estate::new();
    let all = [1, 2, 3].map(digest).map(Entry::Agent);
    all.iter().for_each(|entry| estate.make(*entry));
    let instances = [(); 3].map(|()| estate.instance());
    for ((_, pins), entry) in instances.iter().zip(all) {
        drop(pins.hold([entry]).unwrap());
    }
    let [stopped, removed, unreadable] = instances.map(|(instance, _)| instance);
    std::fs::remove_dir_all(estate.data(&removed)).unwrap();
    std::fs::write(pins_of(&estate.cache()).join(unreadable.as_str()).join("home"), "x").unwrap();
    std::fs::remove_dir_all(estate.data(&unreadable)).unwrap();
    let mark = pins_of(&estate.cache()).join(removed.as_str()).join("missed");
    let day = Duration::from_secs(24 * 3600);
    assert_eq!(sweep(&estate.cache(), day).unwrap(), []);
    assert!(mark.exists(), "its folder may be on the move");
    std::fs::create_dir(estate.data(&removed)).unwrap();
    drop(estate.open(&removed));
    assert_eq!(sweep(&estate.cache(), day).unwrap(), []);
    assert!(!mark.exists(), "and be found again");
    std::fs::remove_dir_all(estate.data(&removed)).unwrap();
    assert_eq!(estate.swept(all), [false, true, false]);
    assert!(!pins_of(&estate.cache()).join(removed.as_str()).exists(), "and nobody asks again");
    // It has what it had when it starts again.
    let again = estate.open(&stopped);
    again.begin();
    again.settle(&BTreeSet::new()).unwrap();
    assert_eq!(estate.swept(all), [true, true, false]);
    // By whoever knows that it is gone.
    forget(&estate.cache(), &unreadable).unwrap();
    forget(&estate.cache(), &unreadable).unwrap();
    assert_eq!(estate.swept(all), [true; 3]);
}

#[test]
fn what_was_touched_lately_stays_and_what_was_half_made_does_not() {
    let estate = Estate::new();
    let (_instance, _pins) = estate.instance();
    let entry = Entry::Agent(digest(1));
    estate.make(entry);
    let day = Duration::from_secs(24 * 3600);
    assert_eq!(sweep(&estate.cache(), day).unwrap(), []);
    let path = entry.path(&estate.cache());
    assert!(touch(&estate.cache(), &path).unwrap());
    assert!(!touch(&estate.cache(), &path.join("absent")).unwrap());
    let half = [path.join(".making-1"), estate.cache().join("disks/.making-2")];
    for half in &half {
        std::fs::create_dir_all(half.join("layer/bin")).unwrap();
    }
    let making = share(&estate.cache()).unwrap();
    assert_eq!(sweep(&estate.cache(), Duration::ZERO).unwrap(), [], "somebody makes something");
    assert!(path.exists() && half.iter().all(|half| half.exists()));
    drop(making);
    assert_eq!(sweep(&estate.cache(), day).unwrap(), []);
    assert!(path.exists() && !half.iter().any(|half| half.exists()));
    // What a dead one had begun to remove.
    std::fs::create_dir(estate.cache().join("agents/.going-x")).unwrap();
    assert_eq!(estate.swept([entry]), [true]);
}
