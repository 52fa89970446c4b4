extends "res://addons/envmanager/arena.gd"
## A ball is put to the top by a plain write, where the option "where" says; a lift is put there by place_2d() in reset().

var where := ""
var ticks := 0

@onready var ball: RigidBody2D = $"../Ball"
@onready var lift: AnimatableBody2D = $"../Lift"


func reset(_from: RandomNumberGenerator, options: Dictionary) -> void:
	where = options.get("where", "")
	ticks = 0
	_put("reset")
	if where.begins_with("signal"):
		place_2d(ball, Transform2D(0.0, Vector2(0, 10)), Vector2(0, 60))
	place_2d(lift, Transform2D(0.0, Vector2(200, 10)))


func _ready() -> void:
	$"../Gate".body_entered.connect(_on_entered)


func observe() -> PackedFloat32Array:
	return PackedFloat32Array([ball.position.y, lift.position.y])


func act(_continuous: PackedFloat32Array, _discrete: PackedInt32Array) -> void:
	_put("act")


func after_tick() -> void:
	ticks += 1
	_put("after_tick")


func _physics_process(_delta: float) -> void:
	_put("_physics_process")
	lift.position.y += 5


func _process(_delta: float) -> void:
	_put("_process")


func _put(here: String) -> void:
	if here == where and ticks <= 2:
		ball.position = Vector2(0, 10)
		ball.linear_velocity = Vector2(0, 60)


# The ball goes back to the top when it comes to the gate.
func _on_entered(_body: Node) -> void:
	match where:
		"signal, place_2d":
			place_2d(ball, Transform2D(0.0, Vector2(0, 10)), Vector2(0, 60))
		"signal, deferred":
			ball.set_deferred("position", Vector2(0, 10))
