//! Many small numbers in little memory.

/// A list of numbers at seven bits a byte (LEB128): a billion sequence lengths are two gigabytes,
/// where the finished tables are twenty.
#[derive(Debug, Default)]
pub(crate) struct Compact {
    bytes: Vec<u8>,
    count: u64,
}

impl Compact {
    pub(crate) fn push(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.bytes.push(value as u8);
        self.count += 1;
    }

    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = u64> {
        let mut bytes = self.bytes.iter();
        std::iter::from_fn(move || {
            let (mut value, mut shift) = (0, 0);
            loop {
                let byte = *bytes.next()?;
                value |= u64::from(byte & 0x7f) << shift;
                if byte < 0x80 {
                    return Some(value);
                }
                shift += 7;
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_width_comes_back() {
        let values: Vec<u64> = (0..64)
            .flat_map(|bit| [(1_u64 << bit) - 1, 1 << bit, (1 << bit) + 1])
            .chain([u64::MAX])
            .collect();
        let mut list = Compact::default();
        values.iter().for_each(|&value| list.push(value));
        assert_eq!(list.count(), values.len() as u64);
        assert!(list.iter().eq(values));
    }
}
