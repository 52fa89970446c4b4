tool
extends Reference
# A trained policy, read from a file that `envmanager export RUN --to godot` has written.
#
# The file has two lines of JSON: what it is, with a checksum of the second line; then sizes and weights. The weights
# are kept as 3 x 3 blocks: Basis.xform(Vector3) is one call for 9 products, so a layer of 60 x 60 takes 60
# microseconds, and 340 in plain loops.
const WIDTH = 3  # numbers in a vector

const Wire = preload("res://addons/envmanager/wire.gd")


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


static func _vectors(numbers: PoolRealArray, fill: float) -> Array:
	while numbers.size() % WIDTH != 0:
		numbers.append(fill)
	var found = []
	for i in range(0, numbers.size(), WIDTH):
		found.append(Vector3(numbers[i], numbers[i + 1], numbers[i + 2]))
	return found


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


static func _text_of(path: String):
	var file = File.new()
	return file.get_as_text() if file.open(path, File.READ) == OK else null


static func _json(text: String):
	var parsed = JSON.parse(text)
	return parsed.result if parsed.error == OK else null
