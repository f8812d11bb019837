//! Where things are: per instance in the data folder, by content in the cache folder that all instances share.

use std::path::{Path, PathBuf};

use sandglass_types::{Digest, SandboxId, VolumeId};

/// The two folders of a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPaths {
    /// What belongs to one instance: sandboxes, images, `runsc`'s own state.
    pub data: PathBuf,
    /// What is immutable and named by its content: root file systems, agents, blank disks.
    pub cache: PathBuf,
}

impl HostPaths {
    /// A folder per sandbox.
    #[must_use]
    pub fn sandboxes(&self) -> PathBuf {
        self.data.join("sandboxes")
    }

    /// The files of one sandbox.
    #[must_use]
    pub fn sandbox(&self, id: &SandboxId) -> SandboxPaths {
        SandboxPaths { dir: self.sandboxes().join(id.as_str()) }
    }

    /// A folder per checkpoint image.
    #[must_use]
    pub fn images(&self) -> PathBuf {
        self.data.join("images")
    }

    /// The folder of one checkpoint image.
    #[must_use]
    pub fn image(&self, image: &SandboxId) -> PathBuf {
        self.images().join(image.as_str())
    }

    /// A file per volume.
    #[must_use]
    pub fn volumes(&self) -> PathBuf {
        self.data.join("volumes")
    }

    /// The file system of one volume.
    #[must_use]
    pub fn volume(&self, id: &VolumeId) -> PathBuf {
        self.volumes().join(format!("{id}.img"))
    }

    /// Where a volume is mounted, in the mount namespace of who works on its content only.
    #[must_use]
    pub fn content_mount(&self) -> PathBuf {
        self.data.join("content")
    }

    /// Where the files of a sandbox are mounted, in the mount namespace of who reads them only.
    #[must_use]
    pub fn collected_mount(&self) -> PathBuf {
        self.data.join("collected")
    }

    /// Where its disk is, there.
    #[must_use]
    pub fn collected_disk_mount(&self) -> PathBuf {
        self.data.join("collected-disk")
    }

    /// Where `runsc` keeps one state file, one lock and one socket per sandbox.
    #[must_use]
    pub fn runsc_root(&self) -> PathBuf {
        self.data.join("runsc")
    }

    /// A read-only root file system.
    #[must_use]
    pub fn rootfs(&self, digest: &Digest) -> PathBuf {
        self.cache.join("rootfs").join(digest.to_string())
    }

    /// Layers that put the agent into root file systems, by digest.
    #[must_use]
    pub fn agents(&self) -> PathBuf {
        self.cache.join("agents")
    }

    /// Blank file systems, by size.
    #[must_use]
    pub fn disks(&self) -> PathBuf {
        self.cache.join("disks")
    }
}

/// The files of one sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxPaths {
    dir: PathBuf,
}

impl SandboxPaths {
    /// The folder itself.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The writable disk: a sparse file with an ext4 file system.
    #[must_use]
    pub fn disk(&self) -> PathBuf {
        self.dir.join("disk.img")
    }

    /// Where the disk is mounted, in the sandbox's own mount namespace only.
    #[must_use]
    pub fn disk_mount(&self) -> PathBuf {
        self.dir.join("disk")
    }

    /// Where the root file system is mounted, in the sandbox's own mount namespace only.
    #[must_use]
    pub fn root_mount(&self) -> PathBuf {
        self.dir.join("root")
    }

    /// Where one of its volumes is mounted, in the sandbox's own mount namespace only.
    #[must_use]
    pub fn volume_mount(&self, index: usize) -> PathBuf {
        self.dir.join(format!("volume-{index}"))
    }

    /// The OCI bundle.
    #[must_use]
    pub fn bundle(&self) -> PathBuf {
        self.dir.join("bundle")
    }

    /// What this engine remembers of it.
    #[must_use]
    pub fn record(&self) -> PathBuf {
        self.dir.join("state.json")
    }

    /// How much memory `runsc` shall believe that the machine has.
    #[must_use]
    pub fn meminfo(&self) -> PathBuf {
        self.dir.join("meminfo")
    }

    /// Where `runsc` writes the pid of the sandbox process.
    #[must_use]
    pub fn pid_file(&self) -> PathBuf {
        self.dir.join("sandbox.pid")
    }

    /// Where `runsc` writes its fatal errors. Nothing that the guest does is written there.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.dir.join("runsc.log")
    }

    /// Where the guest's kernel says what it died of.
    #[must_use]
    pub fn panics(&self) -> PathBuf {
        self.dir.join("panics.log")
    }
}
