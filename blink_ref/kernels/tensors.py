"""What the kernels work on: the model's weights and one step's activations, as named tuples of arrays."""

from typing import Any, NamedTuple

Q, K, V, OUT, GATE, UP, DOWN = range(7)
"""Columns of :attr:`Model.matrix`."""

MOST_LOGPROBS = 20
"""Likeliest tokens of a sample at most: as many as ring/layout.py has room for."""


class Model(NamedTuple):
    """A Llama-architecture model in memory. Shapes: see docs/notation.md."""

    weights: Any
    """flat, 16-bit (or float32) as stored: every matrix, row-major [out, in]"""
    matrix: Any
    """int64 [layers, 7]: where each layer's Q, K, V, OUT, GATE, UP, DOWN begin in `weights`"""
    norm: Any
    """float32 [(2 * layers + 1) * D]: gains before attention and before the MLP of each layer, then the last"""
    rope: Any
    """float32 [context, d]: cosines, then sines, of each position's d/2 angles"""
    eos: Any
    """int32 [n]: tokens that end an answer"""
    embed: int
    """where the embedding matrix [vocab, D] begins in `weights`"""
    head: int
    """where the output matrix [vocab, D] begins; the same place where they are tied"""
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: Any
    """float32: added to the mean square in RMSNorm"""
    tiles: int
    """steps of more rows are computed in tiles (see tiles.py, flash.py); 0 = of none"""
    packed: Any
    """int16, flat: every matrix once more, as float16 bits and as tensor cores take it (see packing.py), if steps
    are computed in tiles or from the stream; None on a CPU where none is: both are not compiled then"""
    stream: Any
    """int32 [4 * layers + 1, 8]: of each product, where its weights are in `packed` (see packing.py)"""
    stream_rows: int
    """steps of up to so many rows are computed from the stream (see stream.py); 0 = of none"""


class Sampling(NamedTuple):
    """How each slot's tokens are drawn; arrays over slots. Parameters that are off are 0."""

    temperature: Any
    """float32: 0 = greedy"""
    seed: Any
    """uint64"""
    valid: Any
    """int32: 0 = no request may ask for this"""
    filtered: Any
    """int32: 1 = something below is on, so the draw is not of the plain logits"""
    top_k: Any
    """int32: only so many of the likeliest tokens, and what is as likely as the last of them"""
    top_p: Any
    """float32: only the likeliest whose probabilities reach it"""
    min_p: Any
    """float32: only those at least so likely as the likeliest times it"""
    repetition: Any
    """float32: divides positive logits of the tokens known, and multiplies negative ones"""
    presence: Any
    """float32: taken from the logit of a token that the answer has"""
    frequency: Any
    """float32: taken from it for each time that the answer has it"""
    min_tokens: Any
    """int32: no end token and no stop token before the answer has so many"""
    stops: Any
    """int32: how many of `stop` there are"""
    stop: Any
    """int32 [slots, MOST_STOPS]: tokens that end the answer"""
    biases: Any
    """int32: how many of `bias` there are"""
    bias_token: Any
    """int32 [slots, MOST_BIASES]"""
    bias: Any
    """float32 [slots, MOST_BIASES]: added to the token's logit"""
    logprobs: Any
    """int32: 0 = none, 1 + n = of the token drawn and of the n likeliest"""


class Activations(NamedTuple):
    """One step's intermediate results, float32, flat; row t of a step starts at t * width."""

    x: Any
    """[T, D]: the residual stream"""
    aside: Any
    """[T, D]: that of the step that was put aside for an urgent one"""
    normed: Any
    """[T, D]: `x` times the next norm's gains, as the next product takes it, in tiles"""
    squares: Any
    """[T, D / 128]: sums of the squares of each 128 columns of `x`, in tiles"""
    handed: Any
    """[1 + layers, of_layer]: what phases hand on to each other where rows are computed from the stream (see
    handed.py)"""
    of_layer: int
    """floats of it that a layer has"""
    q: Any
    """[T, H * d]: rotated queries"""
    attended: Any
    """[T, H * d]: what the heads read from the KV cache"""
    gated: Any
    """[T, F]: silu(gate) * up"""
    pieces: Any
    """[blocks, DOTS_ROWS, DOTS_ROWS]: results of pieces of tiles, where linear layers are computed in tiles"""
    met: Any
    """int32 [2, blocks]: how many of a tile's pieces are there"""
    partial: Any
    """What chunks of positions give, until they are merged (see flash_decoding.py): [entries, units, heads,
    most_chunks, d + HEADS_GAP] or, where it is awaited, [layers, items, heads, d + HEADS_GAP]"""
    arrived: Any
    """int32 [entries, units, HEADS]: how many of them are there, of a head; 0 between layers"""
    most_chunks: int
    """chunks that a row sees at most; 0 = the attention of single rows is not cut in chunks"""
    logits: Any
    """[S, vocab], for the rows that want a sample"""
    adjusted: Any
    """[S, vocab]: logits after penalties and biases, of the samples that have filters"""
    counts: Any
    """int32 [S, vocab]: how often the answer has a token, and 1 << 30 if the prompt has it; 0 between steps"""
    chosen_logprob: Any
    """[S, 1 + MOST_LOGPROBS]: of the token drawn, then of the likeliest, in order"""
    likely: Any
    """int32 [S, MOST_LOGPROBS]: the ids of the likeliest, in order; ties to the smaller id"""
