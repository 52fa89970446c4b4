tool
extends Reference
# A trained policy, read from a file that `envmanager export RUN --to godot` has written.
#
# The file has two lines of JSON: what it is, with a checksum of the second line; then sizes and weights. The weights
# are kept as 3 x 3 blocks: Basis.xform(Vector3) is one call for 9 products, so a layer of 60 x 60 takes 60
# microseconds, and 340 in plain loops.

const Wire = preload("res://addons/envmanager/wire.gd")
const FORMAT = "envmanager.policy"
const VERSION = 1
const WIDTH = 3  # numbers in a vector
const EXPORT = "export it again with `envmanager export RUN --to godot`"
const MISSING = "is not there. `envmanager export RUN --to godot` writes it; an exported game has it if the plugin is enabled, or if the filter of the export has *.policy"
const OTHER_VERSION = "has version %d of the format, and this addon reads %d. `envmanager godot install-addon` brings the addon of the library that wrote it"

var problem: String = ""  # why it cannot be used, as the end of a sentence
var sizes: Array = []  # of each observation: its numbers
var continuous_size: int = 0
var discrete_choices: Array = []
var ticks: int = 0  # per action in the training; 0 where that had none
var _mean: Array = []  # empty: the observations are not normalized
var _deviation: Array = []
var _most: float = 0.0  # after the normalization
var _layers: Array = []


func _init(path: String) -> void:
	var text = _text_of(path)
	var lines = str(text).strip_edges().split("\n")
	var head = _json(lines[0])
	if text == null:
		problem = MISSING
	elif not head is Dictionary or str(head.get("format")) != FORMAT or not head.get("version") is float:
		problem = "is no policy for a game; " + EXPORT
	elif int(head["version"]) != VERSION:
		problem = OTHER_VERSION % [head["version"], VERSION]
	elif lines.size() != 2 or lines[1].strip_edges().sha256_text() != str(head.get("sha256")):
		problem = "is damaged; " + EXPORT
	else:
		_read(_json(lines[1]))


# What does not fit agents of these sizes, as the end of a sentence, or "".
func misfit(of_sizes: Array, of_continuous: int, of_choices: Array) -> String:
	if of_sizes == sizes and of_continuous == continuous_size and of_choices == discrete_choices:
		return ""
	var own = [sizes, continuous_size, discrete_choices, of_sizes, of_continuous, of_choices]
	var told = "is for observations of %s numbers, continuous_size %d, discrete_choices %s; the agent has %s, %d, %s. "
	return told % own + "Give the agent those sizes, or train it with its own and " + EXPORT


# What an agent does that sees this, one packed array for each observation: [continuous, discrete], for its act().
func decide(parts: Array) -> Array:
	var seen = PoolRealArray()
	for part in parts:
		seen.append_array(part if part is PoolRealArray else PoolRealArray(Array(part)))
	var values = _vectors(seen, 0.0)
	for i in _mean.size():
		values[i] = _clamped((values[i] - _mean[i]) / _deviation[i], _most)
	for layer in _layers:
		values = _applied(layer, values)
	var continuous = PoolRealArray()
	for i in continuous_size:
		continuous.append(clamp(_at(values, i), -1.0, 1.0))
	var discrete = PoolIntArray()
	var first = continuous_size
	for n in discrete_choices:
		var best = 0
		for choice in range(1, n):
			if _at(values, first + choice) > _at(values, first + best):
				best = choice
		discrete.append(best)
		first += n
	return [continuous, discrete]


func _read(body: Dictionary) -> void:
	for size in body["observation_sizes"]:
		sizes.append(int(size))
	continuous_size = int(body["continuous_size"])
	for n in body["discrete_choices"]:
		discrete_choices.append(int(n))
	ticks = int(body["ticks_per_action"])
	if body["normalization"] != null:
		_mean = _vectors(_floats(body["normalization"]["mean"]), 0.0)
		_deviation = _vectors(_floats(body["normalization"]["deviation"]), 1.0)
		_most = body["normalization"]["most"]
	for layer in body["layers"]:
		var n_in = int(layer["inputs"])
		var n_out = int(layer["outputs"])
		var blocks = _blocks(_floats(layer["weights"]), n_in, n_out)
		_layers.append([blocks, _vectors(_floats(layer["biases"]), 0.0), n_out, layer["activation"]])


func _applied(layer: Array, values: Array) -> Array:
	var blocks = layer[0]
	var biases = layer[1]
	var next = []
	var k = 0
	for bias in biases:
		var sum = bias
		for value in values:
			sum += blocks[k].xform(value)
			k += 1
		next.append(sum)
	_activate(next, layer[3])
	var last = next.size() - 1
	for i in range(layer[2] - WIDTH * last, WIDTH):  # beyond the layer: a product of 0 and infinity is not 0
		next[last][i] = 0.0
	return next


static func _activate(values: Array, how: String) -> void:
	if how == "tanh":
		for i in values.size():
			var v = values[i]
			values[i] = Vector3(tanh(v.x), tanh(v.y), tanh(v.z))
	elif how == "relu":
		for i in values.size():
			var v = values[i]
			values[i] = Vector3(max(v.x, 0.0), max(v.y, 0.0), max(v.z, 0.0))


static func _clamped(v: Vector3, most: float) -> Vector3:
	return Vector3(clamp(v.x, -most, most), clamp(v.y, -most, most), clamp(v.z, -most, most))


static func _at(values: Array, i: int) -> float:
	return values[i / WIDTH][i % WIDTH]


# The numbers as vectors, filled up at the end.
static func _vectors(numbers: PoolRealArray, fill: float) -> Array:
	while numbers.size() % WIDTH != 0:
		numbers.append(fill)
	var found = []
	for i in range(0, numbers.size(), WIDTH):
		found.append(Vector3(numbers[i], numbers[i + 1], numbers[i + 2]))
	return found


# The weights of a layer, row by row, as blocks. What a block has beyond its layer is 0.
static func _blocks(weights: PoolRealArray, n_in: int, n_out: int) -> Array:
	var found = []
	for row in range(0, n_out, WIDTH):
		for column in range(0, n_in, WIDTH):
			var block = Basis(Vector3.ZERO, Vector3.ZERO, Vector3.ZERO)
			for j in min(WIDTH, n_in - column):
				for i in min(WIDTH, n_out - row):
					block[j][i] = weights[(row + i) * n_in + column + j]
			found.append(block)
	return found


static func _floats(text: String) -> PoolRealArray:
	return Wire.to_floats(Marshalls.base64_to_raw(text))


# The content of a file; null when there is none.
static func _text_of(path: String):
	var file = File.new()
	return file.get_as_text() if file.open(path, File.READ) == OK else null


static func _json(text: String):
	var parsed = JSON.parse(text)
	return parsed.result if parsed.error == OK else null
