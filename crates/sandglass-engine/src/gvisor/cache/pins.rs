//! What one instance needs of the cache folder.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use sandglass_types::InstanceId;

use super::home::Home;
use super::{Entry, MAKING, gone, pins_of, share};
use crate::files::replace_for_good;
use crate::locks::lock;

/// The pins of this instance.
#[derive(Debug)]
pub(in super::super) struct Pins {
    cache: PathBuf,
    folder: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Those that are there.
    written: BTreeSet<Entry>,
    /// How many verbs use each now.
    held: BTreeMap<Entry, usize>,
    /// All that verbs have used since somebody began to look at what is needed: what they did may not have been seen.
    since: BTreeSet<Entry>,
}

/// Entries that stay for as long as this lives.
#[derive(Debug)]
pub(in super::super) struct Held<'a> {
    pins: &'a Pins,
    entries: Vec<Entry>,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.pins.state);
        for entry in &self.entries {
            let left = state.held.get(entry).map_or(0, |count| count.saturating_sub(1));
            if left == 0 {
                state.held.remove(entry);
            } else {
                state.held.insert(*entry, left);
            }
        }
    }
}

impl Pins {
    /// Takes up the pins of an instance with this data folder, given by its canonical path.
    pub(in super::super) fn open(cache: &Path, data: &Path, instance: &InstanceId) -> io::Result<Self> {
        let home = Home::claim(data, instance)?;
        let _nobody_sweeps = share(cache)?;
        let all = pins_of(cache);
        let folder = all.join(instance.as_str());
        if folder.try_exists()? {
            replace_for_good(&folder.join("home"), &home.to_bytes())?;
        } else {
            // Never without its home, so that nobody wonders for ever whose it is.
            let making = tempfile::Builder::new().prefix(MAKING).tempdir_in(&all)?;
            let made = making.path().join("pins");
            fs_err::create_dir(&made)?;
            replace_for_good(&made.join("home"), &home.to_bytes())?;
            fs_err::rename(&made, &folder)?;
        }
        fs_err::File::open(&all)?.sync_all()?;
        let state = State { written: read(&folder)?, ..State::default() };
        Ok(Self { cache: cache.to_owned(), folder, state: Mutex::new(state) })
    }

    /// Pins what a verb is about to use. Whether it is there is to be looked at afterwards: from then on it stays.
    pub(in super::super) fn hold(&self, entries: impl IntoIterator<Item = Entry>) -> io::Result<Held<'_>> {
        let entries: Vec<_> = entries.into_iter().collect();
        let mut state = lock(&self.state);
        self.write(&mut state, &entries)?;
        for entry in &entries {
            *state.held.entry(*entry).or_default() += 1;
            state.since.insert(*entry);
        }
        Ok(Held { pins: self, entries })
    }

    /// Begins to look at what is needed, of which [`Pins::settle`] is told then. One at a time.
    pub(in super::super) fn begin(&self) {
        let mut state = lock(&self.state);
        state.since = state.held.keys().copied().collect();
    }

    /// Pins what is needed, and nothing else but what verbs have used meanwhile.
    pub(in super::super) fn settle(&self, needed: &BTreeSet<Entry>) -> io::Result<()> {
        let mut state = lock(&self.state);
        self.write(&mut state, needed)?;
        let State { written, since, .. } = &mut *state;
        let surplus: Vec<_> = written
            .iter()
            .filter(|entry| !needed.contains(entry) && !since.contains(entry))
            .copied()
            .collect();
        for entry in surplus {
            gone(fs_err::remove_file(self.folder.join(entry.to_string())))?;
            written.remove(&entry);
        }
        Ok(())
    }

    fn write<'a>(&self, state: &mut State, entries: impl IntoIterator<Item = &'a Entry>) -> io::Result<()> {
        let new: BTreeSet<_> =
            entries.into_iter().filter(|entry| !state.written.contains(entry)).copied().collect();
        if new.is_empty() {
            return Ok(());
        }
        let _nobody_sweeps = share(&self.cache)?;
        // What is not there need not stay, and nobody who asks for it fills this folder.
        for entry in new.into_iter().filter(|entry| entry.path(&self.cache).is_dir()) {
            fs_err::File::create(self.folder.join(entry.to_string()))?;
            state.written.insert(entry);
        }
        fs_err::File::open(&self.folder)?.sync_all()?;
        sandglass_failpoint::hit("engine.cache.pinned")?;
        Ok(())
    }
}

/// The pins in the folder of an instance.
pub(super) fn read(folder: &Path) -> io::Result<BTreeSet<Entry>> {
    let mut found = BTreeSet::new();
    for entry in fs_err::read_dir(folder)? {
        found.extend(entry?.file_name().to_str().and_then(|name| name.parse::<Entry>().ok()));
    }
    Ok(found)
}
