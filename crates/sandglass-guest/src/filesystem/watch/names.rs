//! What the watched folders are called: their numbers in the kernel, and their names below one another.

use std::collections::{BTreeMap, HashMap};

/// A folder's number, which the kernel gives out: the same for a folder wherever it is moved to.
pub(super) type Wd = i32;

/// Folders below one another, at most. Names that lead further down are not followed.
const MAX_DEPTH: usize = 200;

#[derive(Debug)]
struct Node {
    parent: Wd,
    name: Vec<u8>,
}

/// What came of putting a folder somewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Placed {
    /// It was not known.
    New,
    /// It was known, there or elsewhere.
    Known,
    /// It can't be there: it would be below itself, which says that names are out of date, or too deep.
    Impossible,
}

/// The folders that are watched, as a tree of names.
#[derive(Debug)]
pub(super) struct Names {
    root: Wd,
    nodes: HashMap<Wd, Node>,
    /// From a name in a folder to what has it. One that lost its name to another is still in `nodes`, until the kernel
    /// says that it is gone.
    children: BTreeMap<(Wd, Vec<u8>), Wd>,
}

impl Names {
    /// The folder that the client named, alone.
    pub(super) fn new(root: Wd) -> Self {
        Self { root, nodes: HashMap::new(), children: BTreeMap::new() }
    }

    /// The number of the folder that the client named.
    pub(super) const fn root(&self) -> Wd {
        self.root
    }

    /// Whether the folder is one of them.
    pub(super) fn contains(&self, wd: Wd) -> bool {
        wd == self.root || self.nodes.contains_key(&wd)
    }

    /// All of them but the root.
    pub(super) fn below(&self) -> impl Iterator<Item = Wd> + '_ {
        self.nodes.keys().copied()
    }

    /// The names that lead from the root to a folder; none if it is in one that was forgotten.
    pub(super) fn way(&self, wd: Wd) -> Option<Vec<&[u8]>> {
        let mut way = Vec::new();
        let mut at = wd;
        while at != self.root {
            let node = self.nodes.get(&at)?;
            way.push(node.name.as_slice());
            at = node.parent;
        }
        way.reverse();
        Some(way)
    }

    /// The path of a name in a folder, from the root.
    pub(super) fn path(&self, wd: Wd, name: &[u8]) -> Option<Vec<u8>> {
        let mut way = self.way(wd)?;
        way.push(name);
        Some(way.join(&b'/'))
    }

    /// The folder of this name in another.
    pub(super) fn child(&self, parent: Wd, name: &[u8]) -> Option<Wd> {
        self.children.get(&(parent, name.to_vec())).copied()
    }

    /// Puts a folder, known or new, under this name.
    pub(super) fn place(&mut self, parent: Wd, name: &[u8], wd: Wd) -> Placed {
        let mut at = parent;
        for depth in 0.. {
            if at == wd || wd == self.root || depth >= MAX_DEPTH {
                return Placed::Impossible;
            }
            match self.nodes.get(&at) {
                Some(node) => at = node.parent,
                None => break,
            }
        }
        self.unlink(wd);
        self.children.insert((parent, name.to_vec()), wd);
        match self.nodes.insert(wd, Node { parent, name: name.to_vec() }) {
            None => Placed::New,
            Some(_) => Placed::Known,
        }
    }

    /// Takes a folder's name away, unless another has it by now.
    fn unlink(&mut self, wd: Wd) {
        if let Some(node) = self.nodes.get(&wd) {
            let key = (node.parent, node.name.clone());
            if self.children.get(&key) == Some(&wd) {
                self.children.remove(&key);
            }
        }
    }

    /// Forgets a folder; whether it was known.
    pub(super) fn remove(&mut self, wd: Wd) -> bool {
        self.unlink(wd);
        self.nodes.remove(&wd).is_some()
    }

    /// A folder and all below it.
    pub(super) fn tree(&self, wd: Wd) -> Vec<Wd> {
        let mut found = vec![wd];
        let mut next = 0;
        while let Some(&parent) = found.get(next) {
            next += 1;
            let children = self.children.range((parent, Vec::new())..);
            found.extend(children.take_while(|((of, _), _)| *of == parent).map(|(_, wd)| *wd));
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn path(names: &Names, wd: Wd) -> String {
        String::from_utf8(names.path(wd, b"f").unwrap()).unwrap()
    }

    #[test]
    fn names_follow_what_is_moved() {
        let mut names = Names::new(1);
        assert_eq!(path(&names, 1), "f");
        assert_eq!(names.place(1, b"a", 2), Placed::New);
        assert_eq!(names.place(2, b"b", 3), Placed::New);
        assert_eq!((path(&names, 3), names.child(2, b"b")), ("a/b/f".into(), Some(3)));
        assert_eq!(names.place(1, b"c", 2), Placed::Known);
        assert_eq!((path(&names, 3), names.child(1, b"a")), ("c/b/f".into(), None));
        assert_eq!(names.tree(2), [2, 3]);
        assert_eq!(names.place(3, b"x", 2), Placed::Impossible);
        assert_eq!(names.place(3, b"x", 1), Placed::Impossible);
        // Another takes the name of one that is gone but was not reported yet.
        assert_eq!(names.place(1, b"c", 4), Placed::New);
        assert!(names.remove(2) && !names.remove(2));
        assert_eq!(names.child(1, b"c"), Some(4));
    }

    proptest! {
        #[test]
        fn no_order_of_events_makes_a_circle(moves in prop::collection::vec((1..12_i32, 0..4_u8, 1..12_i32), 0..200)) {
            let mut names = Names::new(1);
            for (parent, name, wd) in moves {
                if !names.contains(parent) {
                    continue;
                }
                names.place(parent, &[b'a' + name], wd);
                for known in 1..12 {
                    prop_assert!(names.way(known).is_none_or(|way| way.len() < 12));
                    prop_assert!(names.tree(known).len() <= 12);
                }
            }
        }
    }
}
