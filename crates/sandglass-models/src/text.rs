//! How many tokens a text can be.
//!
//! No provider tells how its models cut text, and all cut it in another way. But all have tokens for parts of common words, and make of
//! what is rare as many tokens as it has bytes.

/// Small letters of a word that are a token.
const LETTERS: u64 = 3;

/// Spaces in a row that are a token.
const SPACES: u64 = 4;

/// The tokens of a text, as far as its bytes tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tokens {
    /// So many of it are likely not exceeded: small letters are a token for three of a word, and all else is one for each byte, but for the
    /// space before a word. English is less than two thirds of that, and what was made to be more is not twice as much.
    pub likely: u64,
    /// So many of it can't be exceeded: no token is shorter than a byte.
    pub most: u64,
}

impl Tokens {
    pub(crate) const fn and(self, other: Self) -> Self {
        Self { likely: self.likely.saturating_add(other.likely), most: self.most.saturating_add(other.most) }
    }

    pub(crate) const fn without(self, other: Self) -> Self {
        Self { likely: self.likely.saturating_sub(other.likely), most: self.most.saturating_sub(other.most) }
    }
}

/// Those of JSON.
pub(crate) fn tokens_of(json: &[u8]) -> Tokens {
    let (mut likely, mut word, mut gap) = (0_u64, 0_u64, 0_u64);
    let mut bytes = json.iter();
    while let Some(byte) = bytes.next() {
        if byte.is_ascii_lowercase() {
            likely += gap.saturating_sub(1).div_ceil(SPACES);
            (gap, word) = (0, word + 1);
            continue;
        }
        likely += word.div_ceil(LETTERS);
        word = 0;
        if *byte == b' ' {
            gap += 1;
            continue;
        }
        let of_word = u64::from(byte.is_ascii_uppercase());
        likely += gap.saturating_sub(of_word).div_ceil(SPACES) + 1;
        gap = 0;
        if *byte == b'\\' && bytes.next() == Some(&b'u') {
            bytes.nth(3);
        }
    }
    likely += word.div_ceil(LETTERS) + gap.div_ceil(SPACES);
    Tokens { likely, most: u64::try_from(json.len()).unwrap_or(u64::MAX) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn words_are_cheaper_than_what_is_rare() {
        for (text, likely) in [
            ("", 0),
            ("the implementation", 1 + 5),
            ("Hello, World", 3 + 1 + 3),
            ("aGVsbG8", 6),
            ("0123456789", 10),
            ("{}[]<>~|", 8),
            ("привет", 12),
            ("𓀀", 4),
            ("x        y", 1 + 2 + 1),
            ("\\n\\u0001\\\"", 3),
        ] {
            let tokens = tokens_of(text.as_bytes());
            assert_eq!((tokens.likely, tokens.most), (likely, text.len() as u64), "{text}");
        }
        let prose =
            include_str!("text.rs").lines().filter(|line| line.starts_with("//!")).collect::<String>();
        let tokens = tokens_of(prose.as_bytes()).likely;
        let length = prose.len() as u64;
        assert!((length / 4..length / 2).contains(&tokens), "{tokens} of {length}");
    }

    proptest! {
        #[test]
        fn no_text_has_more_tokens_than_bytes_nor_fewer_by_growing(text: String, more: String) {
            let tokens = tokens_of(text.as_bytes());
            prop_assert!(tokens.likely <= tokens.most);
            prop_assert!(tokens.most <= 4 * tokens.likely + 4 || text.contains('\\'));
            let grown = tokens_of(format!("{text}\"{more}").as_bytes());
            prop_assert!(grown.likely >= tokens.likely || text.contains('\\'));
        }
    }
}
