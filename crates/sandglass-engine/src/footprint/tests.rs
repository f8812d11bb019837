use std::ffi::CString;
use std::os::unix::fs::FileExt as _;

use sandglass_linux::loopdev::LoopDevice;
use sandglass_linux::mount::{Mount, MountNamespace, Propagation};
use sandglass_linux::process::{Launch, run};

use super::*;

const MIB: u64 = 1 << 20;

fn extent(physical: impl Into<Option<u64>>, len: u64, shared: bool) -> Extent {
    Extent { physical: physical.into(), len, shared }
}

#[test]
fn what_is_shared_is_not_its_own() {
    let mut sum = Sum::default();
    assert_eq!(sum.add(extent(0, 10, false), 1), None);
    assert_eq!(sum.add(extent(50, 20, true), 1), Some(Run { device: 1, start: 50, len: 20 }));
    assert_eq!(sum.add(extent(None, 5, true), 1), None, "nobody knows where it is");
    let footprint = |bytes, unique_bytes, exact| Footprint { bytes, unique_bytes, exact, compressed: false };
    assert_eq!(sum.whole(40), footprint(40, 15, true));
    assert_eq!(
        sum.whole(20),
        footprint(20, 0, true),
        "a file system that compresses takes less than its extents"
    );
    assert_eq!(sum.cut_off(1000), footprint(1000, 10, false), "what nobody looked at may be shared");
    assert_eq!(Sum::default().whole(4096), footprint(4096, 4096, true));
}

#[test]
fn blocks_of_several_are_counted_once() {
    let again = |runs: &[(u64, u64, u64)]| {
        let mut runs: Vec<_> = runs
            .iter()
            .map(|(device, start, len)| Run { device: *device, start: *start, len: *len })
            .collect();
        counted_again(&mut runs)
    };
    assert_eq!(again(&[]), 0);
    assert_eq!(again(&[(1, 0, 10), (1, 10, 10)]), 0, "beside each other");
    assert_eq!(again(&[(1, 0, 10), (1, 0, 10), (1, 0, 10)]), 20);
    assert_eq!(again(&[(1, 0, 100), (1, 10, 10), (1, 50, 60)]), 60, "one within, one over the end");
    assert_eq!(again(&[(1, 0, 10), (2, 0, 10)]), 0, "of two file systems");
    assert_eq!(again(&[(1, 5, 10), (2, 0, 10), (1, 0, 10)]), 5);
    assert_eq!(again(&[(1, u64::MAX - 1, 10), (1, u64::MAX - 1, 10)]), 1);
}

fn ids<const N: usize>() -> [SandboxId; N] {
    std::array::from_fn(|_| SandboxId::random())
}

fn write(path: &Path, mib: u64) {
    let file = std::fs::File::create(path).unwrap();
    for at in 0..mib {
        file.write_all_at(&vec![u8::try_from(at % 250).unwrap() + 1; 1 << 20], at * MIB).unwrap();
    }
    file.sync_all().unwrap();
}

#[test]
fn where_nothing_is_shared_each_has_all_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let [one, two, none] = ids();
    std::fs::create_dir_all(dir.path().join("one/checkpoint")).unwrap();
    write(&dir.path().join("one/checkpoint/pages"), 3);
    write(&dir.path().join("one/disk"), 1);
    write(&dir.path().join("two"), 2);
    let sparse = std::fs::File::create(dir.path().join("one/sparse")).unwrap();
    sparse.set_len(1 << 40).unwrap();
    std::os::unix::fs::symlink("/dev/zero", dir.path().join("one/link")).unwrap();
    let at = |name: &str| dir.path().join(name);
    let all = [
        (one.clone(), vec![at("one")]),
        (two.clone(), vec![at("absent"), at("two")]),
        (none.clone(), vec![at("absent")]),
    ];
    let measured = measure(all.into_iter()).unwrap();
    let of = |id: &SandboxId| measured.each[id];
    for (id, mib) in [(&one, 4), (&two, 2)] {
        let Footprint { bytes, unique_bytes, exact, .. } = of(id);
        assert!(exact && bytes == unique_bytes, "{:?}", of(id));
        assert!((mib * MIB..mib * MIB + MIB / 4).contains(&bytes), "{bytes}");
    }
    assert!(!measured.each.contains_key(&none));
    assert_eq!(measured.together, of(&one).bytes + of(&two).bytes);
}

/// A new file system that shares blocks, in a mount namespace that ends with this value.
fn with_reflinks(image: &Path, target: &Path) -> MountNamespace {
    let file = std::fs::OpenOptions::new().read(true).write(true).create_new(true).open(image).unwrap();
    file.set_len(512 * MIB).unwrap();
    let launch = Launch::new("/usr/sbin/mkfs.xfs").unwrap().args(["-q", "-m", "reflink=1"]).unwrap();
    let made = run(launch.arg(image).unwrap(), b"", Duration::from_secs(60), 4096).unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let device = LoopDevice::attach(&file).unwrap();
    let text = |path: &Path| CString::new(path.to_str().unwrap()).unwrap();
    let mount = Mount {
        source: text(&device.path()),
        target: text(target),
        fstype: c"xfs".into(),
        flags: 0,
        data: c"nouuid".into(),
    };
    MountNamespace::furnish(Propagation::Slave, &[mount]).unwrap()
}

#[test]
fn where_blocks_are_shared_they_are_counted_once_and_a_deletion_frees_what_was_said() {
    let dir = tempfile::tempdir().unwrap();
    let mounted = dir.path().join("mounted");
    std::fs::create_dir(&mounted).unwrap();
    let namespace = with_reflinks(&dir.path().join("image"), &mounted);
    let measured = namespace.run(|| {
        let [source, copy, alone] = ids();
        let at = |id: &SandboxId| mounted.join(id.as_str());
        let look = |ids: &[&SandboxId]| measure(ids.iter().map(|id| ((*id).clone(), vec![at(id)]))).unwrap();
        write(&at(&source), 8);
        write(&at(&alone), 2);
        let reflink = |from: &Path, to: &Path| {
            let from = std::fs::File::open(from).unwrap();
            rustix::fs::ioctl_ficlone(std::fs::File::create(to).unwrap(), from).unwrap();
        };
        reflink(&at(&source), &at(&copy));
        // The copy goes its own way with two of eight.
        let file = std::fs::OpenOptions::new().write(true).open(at(&copy)).unwrap();
        file.write_all_at(&vec![77; 2 << 20], 3 * MIB).unwrap();
        file.sync_all().unwrap();
        let before = look(&[&source, &copy, &alone]);
        let of = |id: &SandboxId| before.each[id];
        let near = |bytes: u64, mib: u64| (mib * MIB..mib * MIB + MIB / 4).contains(&bytes);
        assert!(near(of(&source).bytes, 8) && near(of(&source).unique_bytes, 2), "{before:?}");
        assert!(near(of(&copy).bytes, 8) && near(of(&copy).unique_bytes, 2), "{before:?}");
        assert!(near(of(&alone).bytes, 2) && of(&alone).bytes == of(&alone).unique_bytes, "{before:?}");
        assert!(near(before.together, 12), "{before:?}");
        assert!(near(look(&[&source, &alone]).together, 10), "of those that are asked for");
        let free = || {
            let system = rustix::fs::statvfs(&mounted).unwrap();
            // What is removed is given back in the background.
            rustix::fs::syncfs(std::fs::File::open(&mounted).unwrap()).unwrap();
            system.f_bfree * system.f_frsize
        };
        free();
        let had = free();
        std::fs::remove_file(at(&source)).unwrap();
        while free() < had + 2 * MIB {
            std::thread::yield_now();
        }
        let after = look(&[&copy]).each[&copy];
        assert!(near(after.unique_bytes, 8), "nobody else has them any more: {after:?}");
    });
    measured.unwrap();
}

#[test]
fn no_file_is_looked_at_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let file = std::fs::File::create(&path).unwrap();
    for piece in 0..700 {
        file.write_all_at(&[1; 4096], piece * 16384).unwrap();
    }
    file.sync_all().unwrap();
    let later = || Instant::now() + Duration::from_secs(3600);
    let with = |mut budget: Budget| super::file(&path, &mut budget, &mut Vec::new()).unwrap();
    let all = with(Budget { extents: MOST, until: later() });
    assert!(all.exact && all.bytes == all.unique_bytes, "{all:?}");
    let some = with(Budget { extents: 1, until: later() });
    assert!(
        !some.exact && some.bytes == all.bytes && (1..all.bytes).contains(&some.unique_bytes),
        "{some:?}"
    );
    let none = with(Budget { extents: MOST, until: Instant::now() });
    assert_eq!(none, Footprint { bytes: all.bytes, unique_bytes: 0, exact: false, compressed: false });
}
