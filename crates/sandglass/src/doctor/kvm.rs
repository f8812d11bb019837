//! Whether hardware can virtualise here. gVisor does not need it; the engines that do, want to know.

use std::path::Path;

use super::check::Check;

const NAME: &str = "KVM";

/// What was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Facts {
    /// `/dev/kvm` can be opened.
    device: bool,
    /// The processor has the instructions, and the module that uses them is loaded.
    hardware: bool,
}

/// `root` is that of a file system with `proc`, `sys` and `dev`.
pub(super) fn look(root: &Path) -> Facts {
    let device = std::fs::OpenOptions::new().read(true).write(true).open(root.join("dev/kvm")).is_ok();
    let processor = std::fs::read_to_string(root.join("proc/cpuinfo")).unwrap_or_default();
    let flags = processor.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    let has = |flag, module| {
        flags.split_whitespace().any(|own| own == flag) && root.join("sys/module").join(module).exists()
    };
    Facts { device, hardware: has("vmx", "kvm_intel") || has("svm", "kvm_amd") }
}

pub(super) fn judge(facts: &Facts) -> Check {
    match facts {
        Facts { device: true, hardware: true } => Check::good(NAME, "accelerated; gVisor does without"),
        // A guest without nested virtualisation may have the device all the same, and no use of it.
        Facts { device: true, hardware: false } => {
            Check::note(NAME, "present, but not accelerated by the processor; gVisor does without")
        }
        Facts { device: false, .. } => Check::note(NAME, "not usable; gVisor does without"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::Verdict;
    use super::*;

    #[test]
    fn a_device_alone_is_no_acceleration() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        for folder in ["dev", "proc", "sys/module/kvm_amd"] {
            std::fs::create_dir_all(at(folder)).unwrap();
        }
        std::fs::write(at("proc/cpuinfo"), "processor: 0\nflags\t\t: fpu sse2\n").unwrap();
        assert!(judge(&look(root.path())).text().contains("not usable"));
        std::fs::write(at("dev/kvm"), "").unwrap();
        let facts = look(root.path());
        assert_eq!(facts, Facts { device: true, hardware: false });
        assert!(judge(&facts).text().contains("not accelerated"));
        std::fs::write(at("proc/cpuinfo"), "processor: 0\nflags\t\t: fpu svm\n").unwrap();
        let facts = look(root.path());
        assert_eq!(judge(&facts).verdict(), Verdict::Good);
        std::fs::write(at("proc/cpuinfo"), "flags\t\t: vmx\n").unwrap();
        assert!(!look(root.path()).hardware, "the module of the other processor");
    }
}
