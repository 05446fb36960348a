//! A small network of dense layers: tanh between the layers, squared error as loss.

/// The number of values before the first layer, and after each.
const WIDTHS: [usize; 4] = [4, 24, 24, 1];

pub(crate) struct Sample {
    inputs: [f32; WIDTHS[0]],
    target: f32,
}

/// Pseudo-random numbers from -1 to 1 with a fixed seed: a Lehmer generator.
fn numbers(seed: u32) -> impl Iterator<Item = f32> {
    let mut state = u64::from(seed);
    std::iter::repeat_with(move || {
        state = state * 48271 % 0x7fff_ffff;
        (state as f64 / f64::from(0x3fff_ffff) - 1.0) as f32
    })
    // Small seeds start with small numbers.
    .skip(3)
}

pub(crate) fn samples(count: usize) -> Vec<Sample> {
    let mut numbers = numbers(2027);
    let mut sample = || {
        let inputs = std::array::from_fn(|_| numbers.next().unwrap_or_default());
        let [a, b, c, d] = inputs;
        let target = (2.0 * a + b).sin() + (c - d).tanh() / 2.0;
        Sample { inputs, target }
    };
    (0..count).map(|_| sample()).collect()
}

/// For each output value: the weights of the inputs, followed by its bias.
#[derive(Clone)]
pub(crate) struct Layer {
    before: usize,
    pub(crate) weights: Vec<f32>,
}

#[derive(Clone)]
pub(crate) struct Network {
    pub(crate) layers: Vec<Layer>,
}

impl Network {
    pub(crate) fn random(seed: u32) -> Self {
        let mut numbers = numbers(seed);
        let layers = WIDTHS.windows(2).map(|pair| {
            let (before, after) = (pair[0], pair[1]);
            let scale = 1.0 / (before as f32).sqrt();
            let weights = (0..(before + 1) * after).map(|_| numbers.next().unwrap_or_default() * scale);
            Layer {
                before,
                weights: weights.collect(),
            }
        });
        Self {
            layers: layers.collect(),
        }
    }

    /// The largest difference of a weight from that of another network.
    pub(crate) fn furthest(&self, other: &Self) -> f32 {
        let pairs = self.layers.iter().zip(&other.layers);
        let pairs = pairs.flat_map(|(own, other)| own.weights.iter().zip(&other.weights));
        pairs.map(|(own, other)| (own - other).abs()).fold(0.0, f32::max)
    }
}

/// The values of a forward pass: the outputs of each layer, for all samples in sequence.
pub(crate) struct Pass {
    values: Vec<Vec<f32>>,
}

impl Pass {
    pub(crate) fn new(network: &Network, samples: usize) -> Self {
        let after = network
            .layers
            .iter()
            .map(|layer| layer.weights.len() / (layer.before + 1));
        let widths = std::iter::once(WIDTHS[0]).chain(after);
        Self {
            values: widths.map(|width| vec![0.0; width * samples]).collect(),
        }
    }

    /// The error of the network for each sample: half of the slope of the loss.
    pub(crate) fn forward(&mut self, network: &Network, samples: &[Sample]) -> Vec<f32> {
        for (into, sample) in self.values[0].chunks_exact_mut(WIDTHS[0]).zip(samples) {
            into.copy_from_slice(&sample.inputs);
        }
        for (at, layer) in network.layers.iter().enumerate() {
            let (before, after) = self.values.split_at_mut(at + 1);
            let width = layer.weights.len() / (layer.before + 1);
            for (from, into) in before[at]
                .chunks_exact(layer.before)
                .zip(after[0].chunks_exact_mut(width))
            {
                for (value, weights) in into.iter_mut().zip(layer.weights.chunks_exact(layer.before + 1)) {
                    let sum: f32 = from.iter().zip(weights).map(|(value, weight)| value * weight).sum();
                    let sum = sum + weights[layer.before];
                    *value = if at + 1 < network.layers.len() { sum.tanh() } else { sum };
                }
            }
        }
        let predicted = self.values.last().into_iter().flatten();
        predicted
            .zip(samples)
            .map(|(predicted, sample)| predicted - sample.target)
            .collect()
    }

    /// One layer's gradient, summed over the samples; returns the slopes before the layer.
    pub(crate) fn backward(&self, network: &Network, at: usize, slopes: &[f32], gradient: &mut [f32]) -> Vec<f32> {
        let layer = &network.layers[at];
        let width = layer.weights.len() / (layer.before + 1);
        let values = &self.values[at];
        let mut slopes_before = vec![0.0; values.len()];
        gradient.fill(0.0);
        let samples = values
            .chunks_exact(layer.before)
            .zip(slopes_before.chunks_exact_mut(layer.before));
        for ((values, slopes_before), slopes) in samples.zip(slopes.chunks_exact(width)) {
            let rows = layer.weights.chunks_exact(layer.before + 1);
            for ((weights, gradient), slope) in rows.zip(gradient.chunks_exact_mut(layer.before + 1)).zip(slopes) {
                for (sum, value) in gradient.iter_mut().zip(values) {
                    *sum += slope * value;
                }
                gradient[layer.before] += slope;
                for (sum, weight) in slopes_before.iter_mut().zip(weights) {
                    *sum += slope * weight;
                }
            }
            // Through the tanh of the previous layer, if there is one.
            for (slope, value) in slopes_before.iter_mut().zip(values) {
                *slope *= 1.0 - value * value;
            }
        }
        slopes_before
    }
}
