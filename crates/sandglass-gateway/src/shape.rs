//! What a text in JSON would take as a tree of values, told before any of it is made: two bytes can become a hundred and more.

/// The deepest that values may be in each other: protocols need about ten.
const MAX_DEPTH: u32 = 64;

/// The most that a text may be made of. A call of a million tokens that fills its model with calls of tools has about a tenth of that.
const MAX_UNITS: u64 = 400_000;

/// Bytes that a unit takes at most. A list begins with room for four values of 32 bytes each, an object with four members of 56 bytes and a
/// set of their names; both may have room for twice of what is in them.
const UNIT: u64 = 160;

/// Counts what a text would be made of. Nothing is said of whether it is JSON. `None` if there is too much of it.
pub(crate) fn tree(text: &[u8]) -> Option<u64> {
    let (mut units, mut depth, mut quoted, mut escaped) = (1_u64, 0_u32, false, false);
    for byte in text {
        if quoted {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => quoted = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => quoted = true,
            b'[' | b'{' => {
                units += 2;
                depth += 1;
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            b',' | b':' => units += 1,
            _ => {}
        }
        if depth > MAX_DEPTH || units > MAX_UNITS {
            return None;
        }
    }
    Some(units * UNIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_strings_takes_no_more_than_they_do() {
        assert_eq!(tree(b"1"), Some(UNIT));
        assert_eq!(tree(br#""[[[{{{,,,:::\"[[[\\""#), Some(UNIT));
        assert_eq!(tree(br#"{"a":[1,2]}"#), Some(UNIT * 7));
    }

    #[test]
    fn neither_deep_nor_many() {
        let deep = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
        assert!(tree(deep(64).as_bytes()).is_some());
        assert!(tree(deep(65).as_bytes()).is_none());
        let flat = deep(64).repeat(1000);
        assert!(tree(flat.as_bytes()).is_some(), "depth ends where values do");
        assert!(tree("[],".repeat(400_000).as_bytes()).is_none());
        assert!(tree("0,".repeat(400_000).as_bytes()).is_none());
    }
}
