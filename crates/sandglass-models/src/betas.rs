//! Which betas of Anthropic's a call may have: they come in a header, and some change what a call costs.

use crate::price::Price;

/// Those that let a call cost more than its tokens, keep something with the provider, or run something there.
const DEAR: [&str; 7] =
    ["code-execution-", "compact-", "fast-mode-", "files-api-", "mcp-client-", "skills-", "web-fetch-"];

/// Lets a call read more than models do otherwise.
const LONG: &str = "context-1m-";

/// What models read without it, in tokens.
const USUAL: u64 = 200_000;

/// What of the header `anthropic-beta` goes on to a model of this price. `None` if nothing does.
#[must_use]
pub fn passed(header: &str, price: &Price) -> Option<String> {
    let goes_on = |beta: &&str| {
        let beta = beta.to_ascii_lowercase();
        let long = beta.starts_with(LONG) && price.max_input <= USUAL;
        !beta.is_empty() && !long && !DEAR.iter().any(|dear| beta.starts_with(dear))
    };
    let passed: Vec<&str> = header.split(',').map(str::trim).filter(goes_on).collect();
    (!passed.is_empty()).then(|| passed.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::price::Prices;

    #[test]
    fn what_changes_the_price_is_left_out() {
        let price = |max_input: u64| {
            let price = format!("{{ input = 1, output = 1, max_input = {max_input}, max_output = 1 }}");
            Prices::parse(&format!("[m]\nprovider = \"p\"\nprice = {price}"))
                .unwrap()
                .model("m")
                .unwrap()
                .1
                .price
        };
        let all = "claude-code-20250219, context-1m-2025-08-07,compact-2026-01-12,,Fast-Mode-2026-02-01,effort-2025-11-24";
        assert_eq!(passed(all, &price(200_000)).unwrap(), "claude-code-20250219,effort-2025-11-24");
        let long = passed(all, &price(1_000_000)).unwrap();
        assert_eq!(long, "claude-code-20250219,context-1m-2025-08-07,effort-2025-11-24");
        assert_eq!(passed("compact-2026-01-12", &price(1)), None);
    }
}
