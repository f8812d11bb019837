//! Dates as HTTP writes them.

const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/// `Sun, 06 Nov 1994 08:49:37 GMT`, from seconds since the Unix epoch; the years 1970 to 9999, others are
/// clipped to them.
pub(crate) fn http_date(seconds: i64) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    let seconds = seconds.clamp(0, 253_402_300_799);
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Days since 0000-03-01 in the proleptic Gregorian calendar, whose eras of 400 years have 146,097 days.
    let day = days + 719_468;
    let (era, day_of_era) = (day / 146_097, day % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let date = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let pick =
        |names: &[&'static str], index: i64| usize::try_from(index).ok().and_then(|i| names.get(i).copied());
    format!(
        "{}, {date:02} {} {year} {:02}:{:02}:{:02} GMT",
        pick(&DAYS, days % 7).unwrap_or("Thu"),
        pick(&MONTHS, month - 1).unwrap_or("Jan"),
        rest / 3600,
        rest / 60 % 60,
        rest % 60
    )
}

/// Reads what [`http_date`] writes, and nothing else; in seconds since the Unix epoch.
pub(crate) fn parse_http_date(text: &str) -> Option<i64> {
    let fields: [&str; 6] = text.split(' ').collect::<Vec<_>>().try_into().ok()?;
    let [_, date, month, year, time, _] = fields;
    let month = i64::try_from(MONTHS.iter().position(|name| *name == month)?).ok()? + 1;
    let number = |text: &str| text.parse::<u16>().ok().map(i64::from);
    let (date, year) = (number(date)?, number(year)?);
    let mut seconds = 0;
    for part in time.split(':') {
        seconds = seconds * 60 + number(part)?;
    }
    // As above: years that begin in March, so that the leap day is their last.
    let year = year - i64::from(month <= 2);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + date - 1;
    let days = 365 * year + year / 4 - year / 100 + year / 400 + day_of_year - 719_468;
    Some(days * 86_400 + seconds).filter(|seconds| http_date(*seconds) == text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_dates() {
        assert_eq!(http_date(784_111_777), "Sun, 06 Nov 1994 08:49:37 GMT");
        assert_eq!(http_date(0), "Thu, 01 Jan 1970 00:00:00 GMT");
        assert_eq!(http_date(951_782_400), "Tue, 29 Feb 2000 00:00:00 GMT");
        assert_eq!(http_date(1_767_225_599), "Wed, 31 Dec 2025 23:59:59 GMT");
        assert_eq!(http_date(-5), http_date(0));
        assert_eq!(http_date(i64::MAX), "Fri, 31 Dec 9999 23:59:59 GMT");
    }

    proptest::proptest! {
        #[test]
        fn dates_are_read_as_they_are_written(seconds in 0..253_402_300_800_i64) {
            proptest::prop_assert_eq!(parse_http_date(&http_date(seconds)), Some(seconds));
        }

        #[test]
        fn nothing_else_is_a_date(text in "[A-Z][a-z]{2}, [0-9]{1,3} [A-Z][a-z]{2} [0-9]{4} [0-9:]{0,9} GMT|.*") {
            proptest::prop_assert!(parse_http_date(&text).is_none_or(|seconds| http_date(seconds) == text));
        }
    }
}
